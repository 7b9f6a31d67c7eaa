"""Explain to people: why a job does not run, and which errors belong together.

The command line, the dashboard and the store's reports import it.
"""
