"""Where images come from: folders, tables, shards, built-in data sets."""
