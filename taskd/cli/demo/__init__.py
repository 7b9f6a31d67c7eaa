"""`taskd demo`: the command, its mail server and the mails that it sends."""
