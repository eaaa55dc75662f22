"""What the model looks at, how far to believe it, and what it learned."""
