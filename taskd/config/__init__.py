"""Settings: declared once (settings.py), parsed (parsing.py), read from all sources (sources.py).

Imports only taskd.errors. Any package can import it.
"""

from taskd.config.parsing import (
    DEFAULT_PORT,
    check_dsn,
    has_password,
    hide_password,
    parse_duration_s,
)
from taskd.config.settings import LOG_LEVELS, PG_MAJOR_OLDEST, Settings
from taskd.config.sources import Loaded, load, read_dsn, task_prefix

__all__ = [
    "DEFAULT_PORT",
    "LOG_LEVELS",
    "PG_MAJOR_OLDEST",
    "Loaded",
    "Settings",
    "check_dsn",
    "has_password",
    "hide_password",
    "load",
    "parse_duration_s",
    "read_dsn",
    "task_prefix",
]
