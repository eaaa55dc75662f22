"""One recipe from start to results.

Imports audit, data, display, evaluation, heads, inference, insight, model, training, zoo.
"""
