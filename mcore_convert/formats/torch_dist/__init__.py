"""The format `torch_dist`: Megatron's distributed checkpoints."""
