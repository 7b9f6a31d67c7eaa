"""Where the database of a producer is, and the connections and the event loop that it uses.

Imports enqueueing and results, whose state belongs to an event loop; the client imports it.
"""
