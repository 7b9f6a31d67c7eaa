"""Attacks on what taskd promises to other users, one test each."""
