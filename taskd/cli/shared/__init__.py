"""Modules that several commands use: session, output, terminal, arguments, refreshing, name hints.

Commands import these modules; these modules import no command.
"""
