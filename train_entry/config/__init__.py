"""The configuration of a training run: its fields (`schema`), how files and words become one (`compose`), and what it
may not say (`refusals`)."""
