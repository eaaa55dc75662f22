"""What the model attends to, which patches matter to it, and what it has learned.

Imports display, evaluation, model.
"""
