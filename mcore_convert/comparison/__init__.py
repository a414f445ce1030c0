"""Two checkpoints: equality, distance, logits."""
