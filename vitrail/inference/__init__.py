"""A trained model put to use: predict, evaluate, and fit heads on its features.

Imports data, display, evaluation, exporting, heads, insight, model, training, zoo.
"""
