"""Record how attempts ended: outcomes become acks, acks are written in batches.

Imports worker.services, worker.observing and worker.attempt_context. worker.running and the rooms
above import it.
"""
