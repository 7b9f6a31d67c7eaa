"""Import the app.

The option `--app` names a module. The app is this module with its submodules. They contain the
@task functions.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import pkgutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from taskd import events
from taskd.client.connecting.background_loop import patched
from taskd.core.tasks import registry as registries
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import AppError

# An import that takes longer than this time is logged, with the line that it executes.
SLOW_S = 10.0
GUARD = (
    "Is the module also a program? Put the statements that run it below "
    '`if __name__ == "__main__":`, so that an import does not execute them'
)


def load_app(name: str) -> Registry:
    """Import the app and its submodules; return the default registry, which has their tasks.

    The current directory is put at the start of sys.path, unless sys.path contains it already.

    Raises:
        AppError: the app cannot be imported, or registers no task.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _log_if_slow(name):
        module = _import(name)
        for path in getattr(module, "__path__", ()):
            for found in pkgutil.walk_packages([path], prefix=f"{name}."):
                # Importing the __main__ of a package would run it as a program.
                if not found.name.endswith(".__main__"):
                    _import(found.name)
    library = patched(sockets=True)
    if library is not None:
        raise AppError(
            f"app {name!r} has let {library} replace Python's threads or sockets (monkey patching) "
            "while it was imported. A worker needs the original ones: it runs an event loop of "
            f"asyncio, and renews its lease in a thread. Patch only where {library} runs the "
            "program, such as in the start script of your web server, and not in modules that "
            "the app imports"
        )
    if not len(registries.DEFAULT):
        raise AppError(
            f"app {name!r} registers no task: decorate its handlers with @task from taskd, and "
            "import the modules of the handlers in the app"
        )
    registries.DEFAULT.module = name
    return registries.DEFAULT


def with_built_ins(registry: Registry, built_ins: Iterable[Task[..., Any]]) -> Registry:
    """Add the built-in tasks to the registry, except those that the app replaces; return it."""
    for task in built_ins:
        own = registry.get(task.name)
        if own is None:
            registry.add_built_in(task)
        elif own is not task:
            events.task_replaced(task.name, f"{own.handler.__module__}.{own.handler.__qualname__}")
    return registry


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SystemExit as error:
        frames = _frames(error)
        where = _at(_module_level(frames) or frames[-1:])
        code = "" if error.code is None else repr(error.code)
        raise AppError(
            f"app {name!r} called sys.exit({code}) while it was imported{where}. {GUARD}"
        ) from error
    except Exception as error:
        raise _not_imported(name, error) from error


def _not_imported(name: str, error: Exception) -> AppError:
    frames = _frames(error)
    where, hint = _at(frames[-1:]), ""
    missing = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if "/" in name or name.endswith(".py"):
        module = name.removeprefix("./").removesuffix(".py").strip("/").replace("/", ".")
        where, hint = "", f"; name the module and not its file: --app {module}"
    elif missing and (name == missing or name.startswith(f"{missing}.")):
        where, hint = "", f"; looked in {Path.cwd()} and where Python finds packages"
    return AppError(
        f"app {name!r} cannot be imported: {type(error).__name__}: {error}{where}{hint}",
        "" if hint else _traceback(error),
    )


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error, without those of this module and of Python's import."""
    return [each for each in traceback.extract_tb(error.__traceback__) if not _is_machinery(each)]


def _is_machinery(frame: traceback.FrameSummary) -> bool:
    return frame.filename in _MACHINERY or frame.filename.startswith("<frozen importlib")


def _module_level(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the innermost frame that runs the statements of a module, in a list, if there is one.

    If the app calls a library that calls sys.exit(), such as a parser of arguments, the result is
    the line of the app with the call of the library.
    """
    return [each for each in frames if each.name == "<module>"][-1:]


def _at(frames: list[traceback.FrameSummary]) -> str:
    return f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error and of its causes, without the frames of the import."""
    shown = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = shown
    while each is not None:
        each.stack = traceback.StackSummary.from_list(
            [frame for frame in each.stack if not _is_machinery(frame)]
        )
        each = each.__cause__ or each.__context__
    return "".join(shown.format())


@contextmanager
def _log_if_slow(name: str) -> Iterator[None]:
    """Log where the import of the app hangs, after SLOW_S, and then at growing intervals."""
    importing, me = _thread.allocate_lock(), _thread.get_ident()

    def watch() -> None:
        began, wait_s = time.monotonic(), SLOW_S
        while not importing.acquire(timeout=wait_s):
            frames = traceback.extract_stack(sys._current_frames()[me])  # noqa: SLF001
            shown = [each for each in frames if not _is_machinery(each)]
            at = _at(_module_level(shown) or shown[-1:]).strip(" ()")
            events.app_import_slow(name, time.monotonic() - began, at, GUARD)
            wait_s *= 2

    importing.acquire()
    # This is not a threading.Thread: when gevent and eventlet replace the module `threading`, they
    # break its threads. The user would see errors of such threads before that of load_app().
    _thread.start_new_thread(watch, ())
    try:
        yield
    finally:
        importing.release()


_MACHINERY = frozenset({__file__, importlib.__file__, contextlib.__file__})
