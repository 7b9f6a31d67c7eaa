"""Statements about jobs: enqueue, claim, ack, rescue, change, results, history, logs and limits.

Imports store.connections. The client, the worker, the command line and the dashboard import this
package.
"""
