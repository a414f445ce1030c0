"""The model, the family, the run and the tensors of a checkpoint."""
