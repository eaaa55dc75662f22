"""The command line: one file per verb.

Imports audit, data, display, heads, inference, insight, model, run, training, tuning, zoo.
"""
