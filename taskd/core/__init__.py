"""Decisions: given a job, a task and an event, compute what happens next.

The code here reads no clock and uses neither I/O nor asyncio. Of taskd, this package imports only
taskd.errors. All packages above it can import it.
"""
