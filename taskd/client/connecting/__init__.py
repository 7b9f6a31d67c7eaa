"""The location of a producer's database, and the connections and event loops of a client.

Of the client, this package imports only enqueueing and results. Other modules of the client import
this package.
"""
