"""Decide: given a job, a task and an event, compute what comes next.

Everything here is pure: no clock, no I/O, no asyncio. It imports only taskd.errors and
taskd.config. Every other package can import it.
"""
