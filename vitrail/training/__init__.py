"""Any module and any batches in, training steps out.

Imports no other folder.
"""
