"""The location of a producer's database, and the connections and event loops that reach it.

Imports enqueueing and results. The client imports it.
"""
