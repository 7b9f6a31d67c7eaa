"""Unique keys: at most one job of a task holds a key; what happens to the next one is chosen."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol, Self

import msgspec

from taskd.core.validation import check_int, check_seconds, shown
from taskd.errors import InvalidJob

KEY_BYTES_MAX = 200
HELD_S_MAX = 365 * 86400.0
# What no key holds, as the domain taskd.unique_key has it.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# PostgreSQL's own bound; such a number as digits is hashed anyway.
DIGITS_MAX = 131_072
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


class KeyScope(StrEnum):
    """For how long a job holds its key."""

    # Until a worker claims it for the first time: what comes later has work of its own to do.
    WAITING = "waiting"
    # Until it has finished, its retries included.
    LIVE = "live"


class OnConflict(StrEnum):
    """What becomes of a job whose key is held by another one."""

    # Nothing; the holder stays as it is.
    SKIP = "skip"
    # A holder that waits gets the new arguments, priority, limits and time; one that runs stays.
    REPLACE = "replace"
    # The same, with the time put off no further than debounce_max_s after it was enqueued.
    DEBOUNCE = "debounce"
    # Enqueueing fails with KeyHeld.
    RAISE = "raise"


class AsksResults(Protocol):
    """A client, as far as the answer to an enqueue needs it."""

    async def result(self, job_id: int, timeout_s: float | None) -> Any:
        """What the job's handler returned."""

    def result_sync(self, job_id: int, timeout_s: float | None) -> Any:
        """The same without an event loop."""


RESULT_TIMEOUT_S = 60.0


class Enqueued(int):
    """The id of the job that was enqueued, or of the one that holds its unique key.

    Attributes:
        outcome: `enqueued`, or what happened instead: `skipped`, `replaced`, `debounced`; to a
            version also `follows` (it runs when the holder has ended) or `ignored` (it is old).
        client: who enqueued it, and can wait for its result.
    """

    outcome: str = "enqueued"
    client: AsksResults | None = None

    async def result(self, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """Wait until the job has ended; what its handler returned.

        Args:
            timeout_s: seconds to wait; None: as long as it takes.

        Raises:
            JobFailed, JobCancelled: it ended so; with its reason and error.
            JobNotFound: its transaction was not committed, or its queue keeps it no longer.
            TimeoutError: it has not ended in time. It goes on.
            RuntimeError: no client has enqueued it.
        """
        return await self._client().result(int(self), timeout_s)

    def result_sync(self, timeout_s: float | None = RESULT_TIMEOUT_S) -> Any:
        """As result(), for code without an event loop.

        Raises:
            RuntimeError: called in an event loop, which it would block.
        """
        return self._client().result_sync(int(self), timeout_s)

    def _client(self) -> AsksResults:
        if self.client is None:
            raise RuntimeError(f"job {int(self)} was enqueued elsewhere: ask client.result(id)")
        return self.client

    def __reduce__(self) -> tuple[Any, ...]:
        # A client, with its connections, stays where it is.
        return (type(self).instead, (int(self), self.outcome))

    @classmethod
    def instead(cls, job_id: int, outcome: str) -> Self:
        """The job that has the key, and what happened to it."""
        told = cls(job_id)
        told.outcome = outcome
        return told


def plain(value: object) -> int:
    """For msgspec as its `enc_hook`: it writes no subclass of int by itself."""
    if isinstance(value, Enqueued):
        return int(value)
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


@dataclass(frozen=True, slots=True)
class Unique:
    """A unique key and its rules; keys belong to the task. All jobs of a key should have one scope.

    Attributes:
        key: 1 to 200 bytes of text.
        by: for a task's option, in place of a key: the arguments that make one. Their values are
            written as JSON, numbers by their value, or hashed when that takes over 200 bytes.
        scope: for how long the job holds it; a word of KeyScope.
        for_s: also for so many seconds from now, whatever has become of the job; up to a year.
        on_conflict: what happens when another job holds it; a word of OnConflict.
        debounce_max_s: with `debounce`, how far the time may be put off in all.
        version: of what the job works on; newer wins, and no other rule goes with it. One that is
            not newer than the last of its key is ignored, for 30 days after that was enqueued.
        version_by: for a task's option, the argument that is the version.

    Raises:
        InvalidJob: a value is outside its limits, or there is not one of key and by.
    """

    key: str = ""
    by: tuple[str, ...] = ()
    scope: str = KeyScope.LIVE
    for_s: float | None = None
    on_conflict: str = OnConflict.SKIP
    debounce_max_s: float | None = None
    version: int | None = None
    version_by: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.by, tuple):
            raise InvalidJob(f"by {shown(self.by)} is no tuple of names: by=('account_id',)")
        if bool(self.key) == bool(self.by):
            raise InvalidJob("a unique job has a key, or the names of the arguments that make one")
        if self.key:
            _check_key(self.key)
        _one_of(KeyScope, "scope", self.scope)
        _one_of(OnConflict, "on_conflict", self.on_conflict)
        if self.for_s is not None:
            check_seconds("for_s", self.for_s, 0.001, HELD_S_MAX)
        if self.debounce_max_s is not None:
            check_seconds("debounce_max_s", self.debounce_max_s, 0.0, HELD_S_MAX)
            if self.on_conflict != OnConflict.DEBOUNCE:
                raise InvalidJob("debounce_max_s goes with on_conflict='debounce'")
        if self.version is not None:
            check_int("version", self.version, -(2**63), 2**63 - 1)
        self._check_version_alone()

    def _check_version_alone(self) -> None:
        if self.version_by and not self.by:
            raise InvalidJob("version_by goes with by")
        rules = (self.scope, self.for_s, self.on_conflict) != (KeyScope.LIVE, None, OnConflict.SKIP)
        if rules and (self.version is not None or self.version_by):
            raise InvalidJob("a version goes with no other rule: newer wins")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments that make the key and the version."""
        return (*self.by, self.version_by) if self.version_by else self.by

    def of(self, args: str, defaults: Mapping[str, Any] = NO_DEFAULTS) -> Self:
        """The same with the key of these arguments, a JSON object as text.

        Args:
            args: of the job.
            defaults: what an argument is that is left out, as JSON has it; null without one.

        Raises:
            InvalidJob: no key or version can be made of them.
        """
        if not self.by:
            return self
        try:
            values = {**defaults, **decode_args(args)}
            key = key_of([values.get(name) for name in self.by])
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidJob(f"no unique key can be made of the arguments: {error}") from None
        version = _whole(values.get(self.version_by)) if self.version_by else self.version
        return replace(self, key=key, by=(), version=version, version_by="")

    def rule(self, defaults: Mapping[str, Any]) -> str:
        """What is published of it, as JSON text, for those that do not import the task."""
        return msgspec.json.encode(asdict(self) | {"defaults": dict(defaults)}).decode()


def of_rule(rule: str, args: str) -> Unique:
    """The unique key that a published rule gives a job with these arguments.

    Raises:
        InvalidJob: none can be made of them.
    """
    said = msgspec.json.decode(rule, type=dict[str, Any])
    defaults = said.pop("defaults")
    return Unique(**said | {"by": tuple(said["by"])}).of(args, defaults)


# Arguments with all the digits of their numbers, for the database makes its keys of them.
decode_args = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode


def key_of(values: list[Any]) -> str:
    """The key that these values make, as JSON has them.

    taskd.unique_key_of() makes the same in the database, byte for byte.
    """
    key = _text(values)
    if len(key.encode()) > KEY_BYTES_MAX or CONTROL.search(key):
        return hashlib.sha256(key.encode()).hexdigest()
    return key


def _text(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{_text(name)}:{_text(each)}" for name, each in sorted(value.items())]
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, float):
        value = Decimal(repr(value))
    if isinstance(value, Decimal):
        return _digits(value)
    return msgspec.json.encode(value).decode()


def _digits(number: Decimal) -> str:
    """A number by its value: 1.0 is `1`, and 1e3 is `1000`."""
    if not number:
        return "0"
    if abs(number.adjusted()) > DIGITS_MAX:
        raise InvalidJob(f"no unique key can be made of {number}: it has too many digits")
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _whole(value: Any) -> Any:
    """A version that is written as 7.0 is 7; what is no number stays, and is refused."""
    if isinstance(value, Decimal) and value.adjusted() < 20 and value == int(value):
        return int(value)
    return value


def _one_of(kind: type[StrEnum], name: str, value: object) -> None:
    if value not in list(kind):
        raise InvalidJob(f"{name} {shown(value)} is none of {', '.join(kind)}")


def _check_key(key: object) -> None:
    if not isinstance(key, str) or CONTROL.search(key):
        raise InvalidJob(f"the unique key {shown(key)} is not a text of printable characters")
    size = len(key.encode(errors="replace"))
    if size > KEY_BYTES_MAX:
        raise InvalidJob(f"the unique key takes {size} bytes; the limit is {KEY_BYTES_MAX}")
