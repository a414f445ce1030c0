"""The format `torch`: a file for each rank."""
