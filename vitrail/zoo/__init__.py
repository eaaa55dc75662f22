"""Named models and their weights: presets, published weights, loading and converting any layout.

Imports data, evaluation, model.
"""
