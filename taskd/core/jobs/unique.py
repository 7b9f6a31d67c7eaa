"""Unique keys: at most one job of a task holds a key; rules say what happens to further jobs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import msgspec

from taskd.core.jobs.json_values import has_odd_float, to_argument_type
from taskd.core.validation import check_int, check_seconds, quoted
from taskd.errors import InvalidJob

KEY_BYTES_MAX = 200
HELD_S_MAX = 365 * 86400.0
# Characters that a key must not contain; the domain taskd.unique_key refuses them, too.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
JSON_KEY = re.compile(r"[ \t\r\n]*[\[{]")
# PostgreSQL stores numbers of at most this many digits. No key can be made of a longer number.
DIGITS_MAX = 131_072
HASHED = "sha256:"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A version that is a time is stored as this number plus its microseconds since 1970.
VERSION_TIMES = 2**62
NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


class KeyScope(StrEnum):
    """How long a job holds its key."""

    # While the job waits, also for a retry. While it runs, a new job with this key can be enqueued.
    WAITING = "waiting"
    # Until the job has finished. A job that waits for a retry keeps its key.
    LIVE = "live"
    # For as long as taskd stores the job, live or finished: until its queue's retention is over.
    HISTORY = "history"
    # For ever, whatever happens to the job. Only `forget_key` frees the key.
    FOREVER = "forever"


# The scopes of keys that stay held after the job has finished.
AFTER_THE_END = (KeyScope.HISTORY, KeyScope.FOREVER)


class OnConflict(StrEnum):
    """What happens when a new job is enqueued while another job, the holder, holds the key."""

    # The new job is not enqueued; the holder stays as it is.
    SKIP = "skip"
    # A waiting holder gets the queue, arguments, options and due time of the new job. If a worker
    # has claimed the holder before, the holder is cancelled instead, and the new job is enqueued; a
    # holder that other jobs wait for always stays. If the holder waits for a retry, the new job is
    # not due before that retry. A running holder does not change.
    REPLACE = "replace"
    # A waiting holder gets the arguments of the new job, and the limit that they make. It keeps its
    # queue, due time, priority and options. A running holder does not change.
    REPLACE_ARGS = "replace_args"
    # Like REPLACE, but new jobs postpone the holder at most until debounce_max_s after its enqueue.
    DEBOUNCE = "debounce"
    # The newest arguments win, as with versions: the new job replaces a waiting holder. If the
    # holder runs, the new job starts when the running attempt has ended. If that attempt has not
    # succeeded, the new job replaces the holder, which is not retried.
    LATEST = "latest"
    # Enqueueing fails with KeyHeld.
    RAISE = "raise"


class HeldKey(NamedTuple):
    """A unique key that is held.

    Attributes:
        job_id: id of the job that holds the key; for a run of a pipeline, the job of its stage.
        state: the state of that job; None if taskd no longer stores the job.
        scope: how long the job holds the key, a value of KeyScope; None if the job has ended and
            only `for_s` or a version holds the key.
        until: the earliest time at which the key can become free, if `for_s` or a version holds the
            key; otherwise None.
        version: the last version of the key, or None.
    """

    job_id: int
    state: str | None
    scope: str | None
    until: datetime | None
    version: int | datetime | None


class NewerStarts(StrEnum):
    """When a newer job of a key starts if an attempt of the older one has not succeeded."""

    # As soon as the newer job is due.
    AT_ONCE = "at_once"
    # Not before the retry of the older job would have been due.
    AFTER_DELAY = "after_delay"


@dataclass(frozen=True, slots=True)
class Unique:
    """A unique key and its rules.

    Each task has its own keys. All jobs of a task with the same key must have the same scope.

    Attributes:
        key: 1 to 200 bytes of text. The text of a JSON list or object is compared by value, as
            make_key() writes it.
        by: names of arguments, instead of `key`; the key is the JSON list of their values. 1 and
            1.0 make the same key. A list that takes over 200 bytes or has control characters is
            hashed. The value of each argument that the task redacts is hashed as well.
        scope: how long the job holds the key, a value of KeyScope. `waiting`: while the job waits,
            also for a retry; `live`: until its end; `history`: for as long as taskd stores the
            finished job; `forever`: without an end.
        for_s: the job holds the key for at least this many seconds, even if it ends earlier; at
            most a year. It cannot be combined with the scopes `history` and `forever`.
        on_conflict: what happens if another job holds the key; a value of OnConflict.
        debounce_max_s: with `debounce`, how long new jobs can postpone the job that holds the key,
            in seconds since that job was enqueued.
        version: the version of the data that the job works on; the newest version wins. A version
            cannot be combined with `scope`, `for_s` or `on_conflict`. For 30 days after the last
            version of a key was enqueued, a job whose version is not newer is ignored. An int
            between -2**62 and 2**62, or an aware datetime; all versions of a key have one type.
        version_by: the name of the argument that contains the version, an int or a datetime. It
            can be given only together with `by`.
        newer_starts: for a key with a version or `latest`: when the newer job starts if an attempt
            of the older job has not succeeded; a value of NewerStarts. The older job is never
            retried.

    Raises:
        InvalidJob: a value is outside its limits, values exclude each other, or not exactly one of
            `key` and `by` is given.
    """

    key: str = ""
    by: tuple[str, ...] = ()
    scope: str = KeyScope.LIVE
    for_s: float | None = None
    on_conflict: str = OnConflict.SKIP
    debounce_max_s: float | None = None
    version: int | datetime | None = None
    version_by: str = ""
    newer_starts: str = NewerStarts.AT_ONCE

    def __post_init__(self) -> None:
        if not isinstance(self.by, tuple):
            raise InvalidJob(f"by {quoted(self.by)} is not a tuple of names: by=('account_id',)")
        if bool(self.key) == bool(self.by):
            raise InvalidJob(
                "a unique job needs either a key, or the names of the arguments that make one"
            )
        if self.key:
            object.__setattr__(self, "key", normal_key(self.key))
            _check_key(self.key)
        _one_of(KeyScope, "scope", self.scope)
        _one_of(OnConflict, "on_conflict", self.on_conflict)
        _one_of(NewerStarts, "newer_starts", self.newer_starts)
        if self.for_s is not None:
            if self.scope in AFTER_THE_END:
                raise InvalidJob(
                    f"scope={str(self.scope)!r} excludes for_s: the key stays held after the job "
                    "has ended"
                )
            check_seconds("for_s", self.for_s, 0.001, HELD_S_MAX)
        if self.debounce_max_s is not None:
            check_seconds("debounce_max_s", self.debounce_max_s, 0.0, HELD_S_MAX)
            if self.on_conflict != OnConflict.DEBOUNCE:
                raise InvalidJob("debounce_max_s needs on_conflict='debounce'")
        if self.version is not None:
            _number_of(self.version)
        self._check_version_alone()

    def _check_version_alone(self) -> None:
        if self.version_by and not self.by:
            raise InvalidJob("version_by needs by")
        rules = (self.scope, self.for_s, self.on_conflict) != (KeyScope.LIVE, None, OnConflict.SKIP)
        if rules and (self.version is not None or self.version_by):
            raise InvalidJob(
                "a version cannot be combined with scope, for_s or on_conflict: the newest version "
                "wins"
            )
        latest = self.on_conflict == OnConflict.LATEST
        if latest and (self.scope, self.for_s) != (KeyScope.LIVE, None):
            raise InvalidJob("on_conflict='latest' needs scope='live', and excludes for_s")
        newest = latest or self.version is not None or self.version_by
        if self.newer_starts != NewerStarts.AT_ONCE and not newest:
            raise InvalidJob("newer_starts needs version, version_by or on_conflict='latest'")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments that make the key and the version."""
        return (*self.by, self.version_by) if self.version_by else self.by

    @property
    def version_number(self) -> int | None:
        """The number by which the database compares the version; None if there is no version."""
        return None if self.version is None else _number_of(self.version)

    def of(
        self,
        args: str,
        defaults: Mapping[str, Any] = NO_DEFAULTS,
        redact: Collection[str] = (),
    ) -> Self:
        """Return a copy whose key and version are computed from these arguments.

        Args:
            args: the job's arguments, as the text of a JSON object.
            defaults: the default values of the task's arguments; an omitted argument without a
                default counts as null.
            redact: arguments of which the key contains only hashes, because keys are displayed.

        Raises:
            InvalidJob: no key or no version can be made of the arguments, or the version is an
                argument that the task redacts.
        """
        if not self.by:
            return self
        if self.version_by in redact:
            raise InvalidJob(redacted_version(self.version_by))
        try:
            values = {**defaults, **decode_args(args)}
            key = key_of(key_values(self.by, values, redact))
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidJob(f"no unique key can be made of the arguments: {error}") from None
        version = self.version
        if self.version_by:
            version = _version_of(self.version_by, values.get(self.version_by))
        return replace(self, key=key, by=(), version=version, version_by="")

    def rule(self, defaults: Mapping[str, Any], redact: Collection[str] = ()) -> str:
        """Return the rule as JSON text, for producers that do not import the task.

        Args:
            defaults, redact: as for of().
        """
        hashed = [name for name in self.by if name in redact]
        fields = asdict(self) | {"defaults": dict(defaults), "redact": hashed}
        return msgspec.json.encode(fields).decode()


def of_rule(rule: str, args: str) -> Unique:
    """Return the unique key of a job with these arguments.

    Args:
        rule: the rule that makes the key, as Unique.rule() returned it.
        args: the job's arguments, as the text of a JSON object.

    Raises:
        InvalidJob: no key or no version can be made of the arguments.
    """
    fields = msgspec.json.decode(rule, type=dict[str, Any])
    defaults, redact = fields.pop("defaults"), fields.pop("redact")
    fields["version"] = _version_of("version", fields["version"])
    return Unique(**fields | {"by": tuple(fields["by"])}).of(args, defaults, redact)


def _number_of(version: object) -> int:
    """Return the number by which the database compares a version.

    For a time, the number is VERSION_TIMES plus the microseconds since 1970. So a version that is a
    time never equals a version that is an int.

    Raises:
        InvalidJob: the version is neither an int within the limits nor an aware datetime.
    """
    if not isinstance(version, datetime):
        check_int("version", version, -VERSION_TIMES + 1, VERSION_TIMES - 1)
        assert isinstance(version, int)
        return version
    if version.utcoffset() is None:
        raise InvalidJob(
            f"the version {version} is a time without a time zone: use datetime.now(UTC), or "
            "value.replace(tzinfo=UTC) if the value is in UTC"
        )
    return VERSION_TIMES + (version - EPOCH) // timedelta(microseconds=1)


def version_of_number(number: int | None) -> int | datetime | None:
    """Return the version that the database has stored as this number."""
    if number is None or number < VERSION_TIMES:
        return number
    return EPOCH + timedelta(microseconds=number - VERSION_TIMES)


def _version_of(name: str, value: Any) -> int | datetime | None:
    """Return the version that an argument contains, as decoded from JSON."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
        if moment is not None and moment.utcoffset() is not None:
            return moment
    elif not isinstance(value, bool) and isinstance(whole := _whole(value), int):
        return whole
    raise InvalidJob(
        f"the argument {name!r} is the version of the job, and must be a whole number, or a time "
        "with a time zone"
    )


def redacted_version(name: str) -> str:
    """Return the error about a version that is a redacted argument."""
    return (
        f"version_by {name!r} names an argument that the task redacts. Versions are compared as "
        "numbers and displayed, so use another argument"
    )


# Decodes numbers with all their digits, as taskd.unique_key_of() does. Both must make the same
# keys.
decode_args = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode
_decode_value = msgspec.json.Decoder(list[Any] | dict[str, Any], float_hook=Decimal).decode


def key_values(
    by: Collection[str], values: Mapping[str, Any], redact: Collection[str]
) -> list[Any]:
    """Return the values that make a key: for each name in `by` its value, or null.

    The hash of a redacted value stands in its place. So the key shows which values are equal, but
    not the values. taskd.hashed_value() computes the same hash in the database.
    """
    return [hashed(values.get(name)) if name in redact else values.get(name) for name in by]


def hashed(value: Any) -> str:
    """Return the SHA-256 hash of a JSON value; equal numbers have equal hashes."""
    return HASHED + hashlib.sha256(_text(value).encode()).hexdigest()


def make_key(*values: Any) -> str:
    """Return the unique key that consists of these values, as Unique(by=...) makes it.

    For example, a job of a task with Unique(by=("account", "month")) has the key
    make_key(42, "2026-01"). Equal values make equal keys; 1.0 equals 1. Arguments that the task
    redacts are hashed in its keys.

    Args:
        values: values that have a JSON form, in the order of the arguments.

    Raises:
        InvalidJob: a value has no JSON form.
    """
    try:
        text = msgspec.json.encode(values, enc_hook=to_argument_type)
        odd = b"null" in text and has_odd_float(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob(f"no unique key can be made of the values: {error}") from None
    if odd:
        raise InvalidJob("no unique key can be made of NaN and infinities: they have no JSON form")
    return key_of(_decode_value(text))


def normal_key(key: str) -> str:
    """Return a key in its normal form: if it is a JSON list or object, as make_key() writes it.

    taskd.normal_key() does the same in the database.
    """
    if not isinstance(key, str) or not JSON_KEY.match(key) or "\\u0000" in key:
        return key
    try:
        return key_of(_decode_value(key))
    except (msgspec.DecodeError, RecursionError, InvalidJob, UnicodeEncodeError):
        return key


def key_of(values: Any) -> str:
    """Return the key of these JSON values.

    taskd.make_key() makes the same key in the database, byte for byte.
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
    """Return the shortest text of a number, without an exponent: `1` for 1.0, `1000` for 1e3."""
    if not number:
        return "0"
    if abs(number.adjusted()) > DIGITS_MAX:
        # The number can be a redacted value, so the message does not quote it.
        raise InvalidJob(f"no key can be made of a number with more than {DIGITS_MAX:,} digits")
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _whole(value: Any) -> Any:
    """Return 7 for 7.0, and any other value unchanged; Unique then checks that it is an int."""
    if isinstance(value, Decimal) and value.adjusted() < 20 and value == int(value):
        return int(value)
    return value


def _one_of(kind: type[StrEnum], name: str, value: object) -> None:
    if value not in list(kind):
        raise InvalidJob(f"{name} {quoted(value)} is none of {', '.join(kind)}")


def _check_key(key: object) -> None:
    if not isinstance(key, str) or CONTROL.search(key):
        raise InvalidJob(f"the unique key {quoted(key)} is not a text of printable characters")
    size = len(key.encode(errors="replace"))
    if size > KEY_BYTES_MAX:
        raise InvalidJob(f"the unique key takes {size} bytes; the limit is {KEY_BYTES_MAX}")
