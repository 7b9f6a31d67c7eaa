"""`taskd db`: the command and the printing of migrations."""
