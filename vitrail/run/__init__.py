"""One recipe from start to results: the only place where all parts meet."""
