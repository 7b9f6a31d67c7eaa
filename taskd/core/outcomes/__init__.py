"""Outcomes: the ways in which an attempt can end, and the policy that decides the ack for each.

Imports core.tasks and core.jobs. The worker, the built-in tasks, the store and the events import
it.
"""
