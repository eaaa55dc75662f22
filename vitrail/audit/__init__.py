"""Finds what is wrong with a data set: `vitrail check`.

Imports data, display.
"""
