"""Data sets: files in, batches out.

Imports display.
"""
