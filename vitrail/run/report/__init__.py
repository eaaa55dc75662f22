"""A run as one HTML page, and several runs compared."""
