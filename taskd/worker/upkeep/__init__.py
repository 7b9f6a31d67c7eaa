"""Upkeep services: rescue, promotion, schedules, pruning; and the worker's reconciler and timer.

There is no leader: every worker runs these services, and each statement can be repeated. These
modules import worker.claiming and the packages below it; only the assembly, worker.worker and
taskd.testing import them.
"""
