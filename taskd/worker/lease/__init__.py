"""The lease of this process: its state, its renewal, its row in the database.

Of the worker, these modules import only worker.observing and worker.services; the packages above
them can import them.
"""
