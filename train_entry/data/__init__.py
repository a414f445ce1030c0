"""Training data: making them (`prepare`), reading them (`indexed`, `mock`, `sft`), and handing them to ranks
(`microbatches`)."""
