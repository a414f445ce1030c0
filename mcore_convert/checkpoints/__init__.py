"""What a checkpoint is: its model, its family, its run, its tensors."""
