"""Any module and any batches in, steps out; knows nothing else."""
