"""What every worker does for all: rescue, promotion, schedules, reconciling, pruning, timers.

There is no leader: each statement is idempotent, and any worker runs it. Imports worker.claiming
and the rooms below it; only the assembly and taskd.testing import it.
"""
