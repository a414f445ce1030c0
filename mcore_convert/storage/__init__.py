"""Reading, writing and moving bytes of files."""
