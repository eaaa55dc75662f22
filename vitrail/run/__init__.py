"""One recipe from start to results.

Imports audit, data, display, evaluation, heads, inference, insight, model, pretraining, training, zoo.
"""  # noqa: E501
