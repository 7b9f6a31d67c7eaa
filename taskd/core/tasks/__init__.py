"""Tasks: handlers with their options and arguments, and the registry that finds them by name.

Imports core.jobs and core.schedule. The other rooms of core and the packages above can import it.
"""
