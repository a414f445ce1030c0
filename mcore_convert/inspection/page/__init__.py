"""Pages: one self-contained file that shows a checkpoint, or what changed between two. Data, templates, and drawing."""
