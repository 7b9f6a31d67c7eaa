"""Outcomes: the ways in which an attempt can end, and the policy that decides the ack for each.

This package imports core.tasks and core.jobs. The worker, the built-in tasks, the store and the
events import this package.
"""
