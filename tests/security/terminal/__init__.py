"""Attacks on who reads a terminal: the commands and the log."""
