"""Checkpoints that a run starts from and writes: `torch_dist`, resumed at any layout, complete or absent."""

from train_entry.checkpoints.checkpoints import Checkpoints, Restored
from train_entry.checkpoints.export import export_hf
from train_entry.checkpoints.source import Source, source_of

__all__ = ["Checkpoints", "Restored", "Source", "export_hf", "source_of"]
