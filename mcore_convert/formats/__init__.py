"""Formats: names and cuts of global tensors, and the files that hold them. Knows no family."""
