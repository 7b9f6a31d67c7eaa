"""Services: what a worker runs during its whole life, their supervisor, and their failures.

Imports no other package of the worker; every other package can import it.
"""
