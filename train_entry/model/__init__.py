"""Computation of the model in training: attention, loss and compilation without Transformer Engine."""
