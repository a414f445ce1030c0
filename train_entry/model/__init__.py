"""How the model is computed in training: attention, loss and compilation without Transformer Engine."""
