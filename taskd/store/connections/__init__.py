"""Connections, pools, LISTEN, transactions, and the translation of PostgreSQL's errors.

The lowest package of the store: the other packages of the store build on it.
"""
