"""Places of bytes, and moving them."""
