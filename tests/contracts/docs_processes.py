"""The processes of docs.py: forked from a server that has read all modules already."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import io
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.contracts.docs_loaded"])


def _prepare(home: str, environ: Mapping[str, str]) -> None:
    os.chdir(home)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [home]


def run_command(args: list[str], home: str, environ: Mapping[str, str], out: str, err: str) -> None:
    _prepare(home, environ)
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    sys.argv = ["taskd", *args]
    from taskd.cli import main

    main()


def run_import(module: str, home: str, environ: Mapping[str, str], pipe: Connection) -> None:
    _prepare(home, environ)
    try:
        importlib.import_module(module)
    except (Exception, SystemExit):  # noqa: BLE001 - reported with its traceback
        pipe.send(traceback.format_exc())
    else:
        pipe.send(None)


def run_python(home: str, environ: Mapping[str, str], pipe: Connection) -> None:
    """A Python prompt that accepts `await`: runs blocks one after the other."""
    _prepare(home, environ)
    names: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        runner.get_loop()
        while (asked := pipe.recv()) is not None:
            source, name, environ = asked
            os.environ.clear()
            os.environ.update(environ)
            printed = io.StringIO()
            error = ""
            try:
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                code = compile(source, name, "exec", flags=flags, dont_inherit=True)
                with redirect_stdout(printed):
                    if code.co_flags & inspect.CO_COROUTINE:
                        runner.run(eval(code, names))  # the pages' own lines
                    else:
                        asyncio.set_event_loop(None)
                        exec(code, names)
            except (Exception, SystemExit):  # noqa: BLE001 - reported with its traceback
                error = traceback.format_exc()
            pipe.send((printed.getvalue(), error))
