"""The optimizer and the learning rate: Megatron Core's, and what they need without Apex and Transformer Engine."""
