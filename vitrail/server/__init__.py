"""The model behind HTTP: `vitrail serve`, its page, and a client.

Imports data, display, exporting, inference, insight.
"""
