"""Access to the dashboard: checks of requests, logins and limits on failed logins.

This package imports no page. The dashboard and its routes import this package.
"""
