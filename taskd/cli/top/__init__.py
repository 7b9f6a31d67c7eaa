"""`taskd top`: the command, its screen, and the tables of the screen."""
