"""Processes for handlers with process=True: the pool, one process, its program, their messages.

Imports the modules of worker.running that a call needs; worker.running.calls and the packages above
worker.running import it.
"""
