"""Benchmarks against other libraries: speed, memory and accuracy."""
