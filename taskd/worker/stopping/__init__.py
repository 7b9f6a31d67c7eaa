"""Stop: the phases of a stop, signals, the watch on the parent, the emergency stop.

Imports worker.running and the rooms below it; lease_lost, the assembly, worker.worker and
worker.processes import it.
"""
