"""Observation of a worker: counters, log lines, progress, the loop monitor.

These modules import only worker.service from the worker; every other package of the worker can
import them.
"""
