"""The optimizer and the learning rate: Megatron Core's, and additions for use without Apex and Transformer Engine."""
