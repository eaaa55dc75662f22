"""Files in, batches out; knows nothing else."""
