"""How a format names and cuts a global tensor, and how its files are read and written. Knows no family."""
