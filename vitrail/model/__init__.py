"""The Vision Transformer: pixels in, logits out.

Shape comments throughout the project use these letters: B images, C channels, H and W pixels,
P patches, p pixels along the side of a patch, N tokens, D width, h heads, d head width,
M width inside the MLP, L blocks, K classes.

Imports no other folder.
"""
