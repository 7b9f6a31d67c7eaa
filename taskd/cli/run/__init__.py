"""`taskd run`: the command, and `--reload`."""
