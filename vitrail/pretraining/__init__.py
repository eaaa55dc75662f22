"""Objectives that need no labels, and those of a teacher: images in, a loss for each image out.

Imports model.
"""
