"""Many runs, to find the settings that suit a data set."""
