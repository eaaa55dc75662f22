"""Logits and labels in, numbers out; knows nothing else."""
