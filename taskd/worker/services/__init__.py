"""Services: what a worker runs during its whole life, their supervisor, and their failures.

Imports no other room of the worker; every room may import it.
"""
