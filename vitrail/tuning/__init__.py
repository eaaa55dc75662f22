"""Hyper-parameter search: many runs, to find the settings that suit a data set.

Imports data, display, run, training, zoo.
"""
