"""Decisions: given a job, a task and an event, compute what happens next.

The code here reads no clock and uses neither I/O nor asyncio. The package imports only
taskd.errors. Packages above it can import it.
"""
