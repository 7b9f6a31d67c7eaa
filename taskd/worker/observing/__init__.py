"""What can be observed of a worker: counters, log capture, progress, the loop monitor.

Imports worker.service only; every other room of the worker may import it.
"""
