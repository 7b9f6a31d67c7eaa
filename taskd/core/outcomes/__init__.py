"""Outcomes: how an attempt can end, and the policy that turns an end into an ack.

Imports core.tasks and core.jobs. The worker, the store and the events import it.
"""
