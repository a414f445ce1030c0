"""The training entry point of Megatron Core models that start from a converted checkpoint."""
