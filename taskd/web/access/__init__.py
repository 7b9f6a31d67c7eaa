"""Who may use the dashboard: request checks, logins and limits on failed logins.

Imports no page. The dashboard and its routes import it.
"""
