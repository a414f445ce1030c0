"""The report of a run: numbers of each step for a terminal, a file, TensorBoard and Weights & Biases, and a picture."""
