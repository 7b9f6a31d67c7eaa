"""Run one attempt: the handler's call in the loop, a thread, a process, a batch or a transaction.

Imports worker.finishing and the packages below it; worker.claiming and the packages above import
it.
"""
