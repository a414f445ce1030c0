"""What Megatron's formats share: names of modules and flat buffers."""
