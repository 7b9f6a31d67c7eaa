"""Modules that several commands use: session, output, terminal, arguments, refreshing, name hints.

Every command imports it; it imports no command.
"""
