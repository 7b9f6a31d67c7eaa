"""Settings: declared once (settings.py), parsed (parsing.py), read from all sources (sources.py).

The package also reads DSNs (dsn.py) and the parameters of libpq in them (libpq_parameters.py).
Service files and variables add further parameters (connection_parameters.py). The package hides the
environment from other processes (environment_block.py).

Of taskd, this package imports only taskd.errors. Any package can import it.
"""

from taskd.config.connection_parameters import connection_parameters, user_of_process
from taskd.config.dsn import DEFAULT_PORT, check_dsn, has_password, hide_password
from taskd.config.parsing import parse_duration_s
from taskd.config.settings import LOG_LEVELS, PG_MAJOR_OLDEST, Settings
from taskd.config.sources import Loaded, load, read_dsn, task_prefix

__all__ = [
    "DEFAULT_PORT",
    "LOG_LEVELS",
    "PG_MAJOR_OLDEST",
    "Loaded",
    "Settings",
    "check_dsn",
    "connection_parameters",
    "has_password",
    "hide_password",
    "load",
    "parse_duration_s",
    "read_dsn",
    "task_prefix",
    "user_of_process",
]
