"""What is wrong with a data set: `vitrail check`.

Imports data, display.
"""
