"""`taskd workflows`: the command, and how runs are started and restarted."""
