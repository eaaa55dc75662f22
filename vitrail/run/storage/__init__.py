"""What a run keeps on disk: its folder and lock, log and predictions; and how to read it back."""
