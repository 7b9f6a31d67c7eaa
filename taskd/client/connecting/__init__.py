"""The location of a producer's database, and the connections and event loops of a client.

Imports enqueueing and results. The modules of the client above import this package.
"""
