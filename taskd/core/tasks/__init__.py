"""Tasks: handlers with their options and arguments, and the registry that finds them by name.

This package imports core.jobs and core.schedule. The other packages of core, and the packages above
core, can import this package.
"""
