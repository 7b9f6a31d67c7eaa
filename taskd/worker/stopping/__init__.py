"""Stop: signals (drain, cancel, abandon), the watch on the parent, the emergency stop.

Imports worker.running and the rooms below it; the assembly, worker.worker and
worker.processes import it.
"""
