"""Run one attempt: the handler's call in the loop, a thread, a process, a batch or a transaction.

Imports worker.finishing and the rooms below it; worker.claiming and the rooms above import it.
"""
