"""Any classifier on top of the features of a frozen model."""
