"""How images get into memory fast: worker processes, caches, buffers."""
