"""Claim jobs: which queue, when, how many. Consumers, LISTEN, idle polling, busy marks, quarantine.

Imports worker.running and the rooms below it. Only worker.upkeep, worker.health and the
assembly import it.
"""
