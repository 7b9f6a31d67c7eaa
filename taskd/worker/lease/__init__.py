"""The lease of this process: its state, its renewal, its row in the database.

From the worker, these modules import only `observing/` and the services; everything above can
import them.
"""
