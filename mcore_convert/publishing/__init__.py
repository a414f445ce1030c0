"""Models as Hugging Face directories, as streams, and on the Hub."""
