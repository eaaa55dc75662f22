"""Millions of images: predictions and features in Parquet parts, and neighbours among features.

Imports data, display, exporting, inference, zoo.
"""
