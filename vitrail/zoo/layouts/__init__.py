"""The layouts of other libraries, one module each: parameter names, tensor shapes, config files."""
