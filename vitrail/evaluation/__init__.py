"""Logits and labels in, numbers out.

Imports no other folder.
"""
