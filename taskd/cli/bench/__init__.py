"""`taskd bench`: the command, its measures and its figures."""
