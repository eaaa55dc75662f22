"""The model for other runtimes, proved equal to PyTorch before a file is written.

Imports data, display, evaluation, model.
"""
