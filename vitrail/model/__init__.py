"""Pixels in, logits out; knows nothing else.

The legend of every shape comment: B images, C channels, H and W pixels, P patches, N tokens,
D width, h heads, d head width, M width inside the MLP, L blocks, K classes.
"""
