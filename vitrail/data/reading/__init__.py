"""Reading images fast: worker processes, caches, buffers."""
