"""Attacks of strangers, producers, workers and texts, on the database, over HTTP and terminals."""
