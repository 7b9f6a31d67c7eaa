"""Claim jobs: from which queue, when, how many.

Consumers, LISTEN, the idle poller, busy marks, quarantine. Imports worker.running and the rooms
below it. Only worker.upkeep, worker.health, worker.lease_lost and the assembly import it.
"""
