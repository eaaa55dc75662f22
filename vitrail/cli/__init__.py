"""The command line: one file per verb."""
