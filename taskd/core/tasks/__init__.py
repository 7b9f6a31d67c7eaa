"""Tasks: handlers with their options and arguments, and the registry that finds them by name.

Imports core.jobs and core.schedule. Any module above can import it.
"""
