"""`taskd doctor`: the command and the printing of its findings."""
