"""The model families, one file each, found through the entry points of pyproject.toml."""
