"""Observation of a worker: counters, log lines, progress, the loop monitor.

Imports only worker.services; the other packages of the worker can import it.
"""
