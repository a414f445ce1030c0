"""Training data: preparing them (`prepare`), reading them (`indexed`, `mock`, `sft`), and splitting them over ranks
(`microbatches`)."""
