"""What a run tells: numbers of each step for a terminal, a file, TensorBoard and Weights & Biases, and a picture."""
