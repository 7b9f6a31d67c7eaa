"""Remember: this package sends every statement that taskd sends to PostgreSQL.

The SQL is in sql/; only this package imports asyncpg. It imports core, events, config and errors;
the client, the worker, the command line and the dashboard import it.
"""
