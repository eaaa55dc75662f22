"""Scikit-learn classifiers on the features of a frozen model.

Imports data, display, evaluation, model, training.
"""
