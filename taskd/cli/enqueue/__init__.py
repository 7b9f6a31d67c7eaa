"""`taskd enqueue`: the command and its NDJSON input."""
