"""Workflows and pipelines as values: their jobs, their stages and their tree.

This package imports core.jobs. The client, the store, the worker, the command line and the
dashboard import this package.
"""
