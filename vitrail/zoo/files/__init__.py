"""Weight files opened safely: nothing is unpickled, and every offset is checked before reading."""
