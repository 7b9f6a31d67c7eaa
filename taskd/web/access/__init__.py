"""Access to the dashboard: checks of requests, logins and limits on failed logins.

Imports no page. The dashboard and its routes import it.
"""
