"""The schema: migrations and their history, roles, and repairs for what `taskd doctor` finds.

Imports store.connections. The command line and the start of the worker import this package.
"""
