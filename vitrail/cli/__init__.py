"""The command line: one file per verb.

Imports audit, data, display, heads, inference, insight, model, pretraining, run, training, tuning, zoo.
"""  # noqa: E501
