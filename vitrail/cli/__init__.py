"""The command line: one file per verb.

Imports audit, data, display, heads, insight, model, run, training, tuning, zoo.
"""
