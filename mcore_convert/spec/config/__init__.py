"""`config.json` and Megatron's arguments: the mapping between them, and the values derived from the arguments."""
