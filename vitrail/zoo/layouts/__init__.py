"""The parameter names and shapes of other libraries, read and written."""
