"""Compute the output of `taskd top` and `taskd tail` from successive reads of the database.

This package imports core.jobs. The command line and the store's reads import this package.
"""
