"""Weight files, opened safely."""
