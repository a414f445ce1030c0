"""The report of a run: metrics of each step for a terminal, a file, TensorBoard and Weights & Biases, and a plot."""
