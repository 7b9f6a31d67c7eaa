"""Start a worker: import the app, check connections, publish tasks and schedules, open resources.

Imports the assembly; worker.worker and the command line import it.
"""
