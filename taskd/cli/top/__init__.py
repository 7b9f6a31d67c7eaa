"""`taskd top`: the command, its screen and its tables."""
