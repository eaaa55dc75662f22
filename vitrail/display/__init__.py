"""What every page, plot and terminal shares.

Imports no other folder.
"""
