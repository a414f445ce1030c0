"""Names of modules and flat buffers, which Megatron's formats share."""
