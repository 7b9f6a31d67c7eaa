"""Connections, pools, LISTEN, transactions, and the translation of PostgreSQL's errors.

The lowest room of the store: it knows statements by name, and no table.
"""
