"""Formats: how global tensors are named and cut, and the files that hold them. Independent of families."""
