"""Observation of a worker: counters, log lines, progress, the loop monitor.

Imports worker.services only; every other room of the worker may import it.
"""
