"""Module names, flat buffers and other parts that Megatron's formats share."""
