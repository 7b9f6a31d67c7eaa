"""The modules that the processes of docs.py have when they are forked:

importing takes half a second.
"""

import importlib

import asyncpg  # noqa: F401
import psycopg  # noqa: F401

import taskd.testing
import taskd.worker  # noqa: F401
from taskd.cli import COMMANDS

for _command in COMMANDS.values():
    importlib.import_module(f"taskd.cli.{_command.module}")
