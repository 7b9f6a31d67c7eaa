"""Claim jobs: from which queue, when, how many.

Contains the consumers, the listener, the idle poller, the busy marks and the quarantine. Imports
worker.running and the packages below it. Only worker.upkeep, worker.health, worker.lease_lost and
the assembly import it.
"""
