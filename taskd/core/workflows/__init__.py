"""Workflows and pipelines as values: their jobs, their stages and their tree.

Imports core.tasks and core.jobs. The client, the command line and the dashboard import it.
"""
