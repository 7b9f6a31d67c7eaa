"""The lease of this process: its state, its renewal, its row in the database.

Everything else in the worker may import it; it imports only the store and `observing/`.
"""
