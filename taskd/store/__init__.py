"""All access to PostgreSQL: the statements of sql/, and the connections that run them.

Only this package imports asyncpg. It imports core, events, config and errors. The client and all
packages above the client can import this package.
"""
