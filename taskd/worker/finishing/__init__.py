"""Record how attempts ended: outcomes become acks, which are written in batches.

Imports worker.services, worker.observing and worker.attempt_context. worker.running and the
packages above import it.
"""
