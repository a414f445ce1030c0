"""One checkpoint: description, statistics, pages."""
