"""What every page, plot and terminal shares; imports only `files` and `errors`."""
