"""Versions of a task's arguments: upgrade older ones, former names, hidden arguments.

Jobs outlive code: a job that was enqueued before a deploy has arguments of that time, and their
version number. Older arguments are upgraded step by step before they are decoded. A job with newer
arguments waits for a worker with newer code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from taskd.core.jobs import failure
from taskd.core.jobs.job import ARGS_VERSION_MAX, check_task_name
from taskd.errors import InvalidArgs

# Turns arguments of one version (a dict, from JSON) into those of the next.
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

HIDDEN = "***"
# Shorter values are not hidden, because they occur in too many unrelated texts.
SECRET_CHARS_MIN = 4
_UNCHANGED = re.compile(r"[ !#-&(-\[\]-~]+")


class ArgsVersions:
    """The present version of a task's arguments, and the steps that upgrade older arguments.

    Attributes:
        args_version: the present version.
        stored: the version in the row of a new job; None is the first version.

    Raises:
        ValueError: the version is not a number from 1 to 32767, or an older version has no step.
        TypeError: a step is not a function.
    """

    def __init__(self, task: str, args_version: int, upgrade: Mapping[int, Upgrade]) -> None:
        whole = isinstance(args_version, int) and not isinstance(args_version, bool)
        if not whole or not 1 <= args_version <= ARGS_VERSION_MAX:
            raise ValueError(
                f"task {task}: args_version {args_version!r} is not 1 to {ARGS_VERSION_MAX}"
            )
        steps = sorted(upgrade)
        if steps != list(range(args_version - len(steps), args_version)) or 0 in steps:
            raise ValueError(
                f"task {task}: upgrade has steps from {steps}; it needs a step from each version, "
                f"from the oldest that can still wait up to {args_version - 1}"
            )
        if not all(callable(step) for step in upgrade.values()):
            raise TypeError(f"task {task}: each step of upgrade must be a function of a dict")
        self.args_version = args_version
        self.stored = None if args_version == 1 else args_version
        self._task, self._upgrade = task, dict(upgrade)

    def is_newer(self, args_version: int | None) -> bool:
        """Return whether arguments of that version need newer code than this."""
        return (args_version or 1) > self.args_version

    def lift(self, args: str, args_version: int) -> str:
        """Return older arguments, upgraded to the present version, as JSON text.

        Raises:
            InvalidArgs: there is no step from their version, or a step failed.
        """
        try:
            names = msgspec.json.decode(args, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidArgs(f"task {self._task}: {error}") from None
        for version in range(args_version, self.args_version):
            names = self._step(names, version)
        return msgspec.json.encode(names).decode()

    def _step(self, args: dict[str, Any], version: int) -> dict[str, Any]:
        step = self._upgrade.get(version)
        if step is None:
            raise InvalidArgs(
                f"task {self._task}: its arguments have version {version}, "
                f"from which no step of `upgrade` leads to version {self.args_version}"
            )
        try:
            lifted = step(args)
            msgspec.json.encode(lifted)
        except Exception as error:
            reason = failure.clean(f"{type(error).__name__}: {error}", 1000)
            raise InvalidArgs(
                f"task {self._task}: upgrading its arguments from version {version} "
                f"to {version + 1} failed: {reason}"
            ) from error
        if not isinstance(lifted, dict):
            raise InvalidArgs(
                f"task {self._task}: upgrading its arguments from version {version} "
                f"gave a {type(lifted).__name__}, not a dict"
            )
        return lifted


def check_aliases(task: str, aliases: Sequence[str]) -> tuple[str, ...]:
    """Return the former names of a task.

    Raises:
        TypeError: it is one text and not several.
        ValueError: a former name is the present name.
        InvalidJob: a name is not valid.
    """
    if isinstance(aliases, str):
        raise TypeError(f"task {task}: aliases {aliases!r} is one text; write [{aliases!r}]")
    names = tuple(dict.fromkeys(check_task_name(name) for name in aliases))
    if task in names:
        raise ValueError(f"task {task}: an alias is a former name, not the name itself")
    return names


def check_redact(
    task: str, redact: Sequence[str], fields: Sequence[str], *, older: bool
) -> tuple[str, ...]:
    """Return the arguments to hide.

    Args:
        fields: the arguments of the present version.
        older: whether there are older versions, whose arguments can have other names.

    Raises:
        TypeError: it is one text, or names an argument that the task does not have.
    """
    if isinstance(redact, str):
        raise TypeError(f"task {task}: redact {redact!r} is one text; write [{redact!r}]")
    for name in redact:
        if name not in fields and not older:
            raise TypeError(f"task {task}: redact: the task has no argument {name!r}")
    return tuple(dict.fromkeys(redact))


def secrets(args: str, redact: Iterable[str]) -> list[str]:
    """Return the texts in a job's arguments that must not be shown, the longest first."""
    try:
        names = msgspec.json.decode(args, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return []
    found: set[str] = set()
    for name in redact:
        _gather(names.get(name), found)
    return sorted((each for each in found if len(each) >= SECRET_CHARS_MIN), key=len, reverse=True)


def _gather(value: Any, found: set[str]) -> None:
    if isinstance(value, dict):
        for each in value.values():
            _gather(each, found)
    elif isinstance(value, list):
        for each in value:
            _gather(each, found)
    elif isinstance(value, str):
        # Errors quote values in other forms: repr() and JSON escape them, an ExceptionGroup indents
        # lines. So unescaped parts of a value are hidden as well.
        forms = (repr(value), ascii(value), msgspec.json.encode(value).decode())
        found.update((value, *(each[1:-1] for each in forms), *_UNCHANGED.findall(value)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found.add(str(value))


def hide(text: str, secret: Iterable[str]) -> str:
    """Return the text with each secret hidden."""
    for each in secret:
        text = text.replace(each, HIDDEN)
    return text
