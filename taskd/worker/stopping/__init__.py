"""Stops of a worker: signals, the phases of a stop, the watch on the parent, the emergency stop.

These modules import worker.running and the packages below it; lease_lost, the assembly,
worker.worker, worker.starting, worker.processes and the command line import them.
"""
