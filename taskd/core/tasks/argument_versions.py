"""Versions of a task's arguments, former names of a task, and redacted arguments.

The row of a job contains its arguments and their version, both as defined by the code that enqueued
the job. If the version is older than the worker's code, the worker upgrades the arguments step by
step, and then decodes them. If the version is newer, the job waits for a worker with newer code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from taskd.core.jobs import failure
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job import ARGS_VERSION_MAX, check_task_name
from taskd.core.jobs.json_values import to_argument_type
from taskd.errors import InvalidArgs

# Converts arguments of one version (a dict, from JSON) into arguments of the next version.
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]

HIDDEN = "***"
# Shorter values are not hidden, because they occur in too many unrelated texts.
SECRET_CHARS_MIN = 4
_UNCHANGED = re.compile(r"[ !#-&(-\[\]-~]+")


class ArgsVersions:
    """The current version of a task's arguments, and the steps that upgrade older arguments.

    Attributes:
        args_version: the current version.
        stored: the version as it is stored in the row of a new job; None stands for version 1.

    Raises:
        ValueError: the version is not a number from 1 to 32767; or the steps do not lead, version
            by version, to the current one.
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
                f"task {task}: upgrade has steps from the versions {steps}. It must have one step "
                "from each older version that jobs in the database can have, without a gap, up to "
                f"version {args_version - 1}"
            )
        if not all(callable(step) for step in upgrade.values()):
            raise TypeError(f"task {task}: each step of upgrade must be a function of a dict")
        self.args_version = args_version
        self.stored = None if args_version == 1 else args_version
        self._task, self._upgrade = task, dict(upgrade)

    def is_newer(self, args_version: int | None) -> bool:
        """Return whether this version is newer than the versions that this code can read."""
        return (args_version or 1) > self.args_version

    def lift(self, args: str, args_version: int) -> str:
        """Upgrade older arguments to the current version, and return their JSON text.

        Raises:
            InvalidArgs: the arguments are not a JSON object; their version has no step; or a step
                raised an exception or returned no JSON object.
        """
        try:
            names = msgspec.json.decode(args, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidArgs(f"task {self._task}: {error}") from None
        for version in range(args_version, self.args_version):
            names = self._step(names, version)
        return encode_args(self._task, names)

    def _step(self, args: dict[str, Any], version: int) -> dict[str, Any]:
        step = self._upgrade.get(version)
        if step is None:
            raise InvalidArgs(
                f"task {self._task}: the job's arguments have version {version}, and `upgrade` has "
                f"no step from this version, so they cannot become version {self.args_version}"
            )
        try:
            lifted = step(args)
            msgspec.json.encode(lifted, enc_hook=to_argument_type)
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
    """Return the former names of a task, each once.

    Raises:
        TypeError: `aliases` is one text and not a sequence of texts.
        ValueError: a former name is the present name.
        InvalidJob: a name is not valid.
    """
    if isinstance(aliases, str):
        raise TypeError(f"task {task}: aliases {aliases!r} is one text; write [{aliases!r}]")
    names = tuple(dict.fromkeys(check_task_name(name) for name in aliases))
    if task in names:
        raise ValueError(f"task {task}: an alias must be a former name, not the present name")
    return names


def check_redact(
    task: str, redact: Sequence[str], fields: Sequence[str], *, older: bool
) -> tuple[str, ...]:
    """Return the names of the redacted arguments, each once.

    Args:
        fields: the arguments of the current version.
        older: whether the task can upgrade older versions, whose arguments can have other names.

    Raises:
        TypeError: `redact` is one text; or it names an unknown argument, and the task has no older
            versions.
    """
    if isinstance(redact, str):
        raise TypeError(f"task {task}: redact {redact!r} is one text; write [{redact!r}]")
    for name in redact:
        if name not in fields and not older:
            raise TypeError(f"task {task}: redact: the task has no argument {name!r}")
    return tuple(dict.fromkeys(redact))


def secrets(args: str, redact: Iterable[str]) -> list[str]:
    """Return the values of redacted arguments, in the forms in which errors can contain them.

    The longest text is first. Texts shorter than SECRET_CHARS_MIN are left out.
    """
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
        # Errors contain values in other forms: repr() and JSON escape characters, and an
        # ExceptionGroup indents lines. So hide the escaped forms, too, and each part of the value
        # that has no special characters.
        forms = (repr(value), ascii(value), msgspec.json.encode(value).decode())
        found.update((value, *(each[1:-1] for each in forms), *_UNCHANGED.findall(value)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found.add(str(value))


def hide(text: str, secret: Iterable[str]) -> str:
    """Return the text with `***` in place of each secret."""
    for each in secret:
        text = text.replace(each, HIDDEN)
    return text
