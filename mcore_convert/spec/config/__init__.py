"""`config.json` and Megatron's arguments: the mapping between them, and what is derived from the arguments."""
