"""One recipe from start to results.

Imports audit, data, display, evaluation, heads, insight, model, training, zoo.
"""
