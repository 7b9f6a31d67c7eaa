"""The lease of this process: its state, its renewal, its row in the database.

Of the packages of the worker, this one imports only worker.observing and worker.services; the
packages above can import it.
"""
