"""The format `hf`: Hugging Face directories."""
