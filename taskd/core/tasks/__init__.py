"""Tasks: a handler, its options, its arguments and the registry that finds it by name.

Imports core.jobs and core.schedule. Any module above may import it.
"""
