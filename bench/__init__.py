"""Speed and memory against the peers, as ratios in one run."""
