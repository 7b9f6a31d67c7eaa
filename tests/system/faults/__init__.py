"""Faults: real workers against a private PostgreSQL that is broken in one way at a time.

Each scenario is a coroutine that returns what it saw; the tests play it short, and
`python -m tests.system.faults` plays it long and prints its figures.
"""
