"""Workflows and pipelines as values: their jobs, their stages and their tree.

Imports core.jobs. The client, the store, the worker, the command line and the dashboard import it.
"""
