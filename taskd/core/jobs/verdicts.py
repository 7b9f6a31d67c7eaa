"""Verdicts: how a handler decides what happens to its job."""

from __future__ import annotations

from taskd.core.validation import quoted


class Verdict(Exception):
    """Raised by a handler, or chosen by a rule of `on_error`, to decide what happens to the job."""


class Retry(Verdict):
    """Retry the job after `delay_s` seconds; with None, after the delay of the task's backoff.

    The attempt counts towards `max_attempts`.
    """

    def __init__(self, delay_s: float | None = None, reason: str = "") -> None:
        super().__init__(reason or "the handler asked for a retry")
        self.delay_s = delay_s


class Snooze(Verdict):
    """Run the job again after `delay_s` seconds.

    The attempt does not count towards `max_attempts`.
    """

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"snoozed for {delay_s} s")
        self.delay_s = delay_s


class Cancel(Verdict):
    """End the job as `cancelled`."""

    def __init__(self, reason: str = "") -> None:
        self.reason = _reason(reason) or "the handler cancelled it"
        super().__init__(self.reason)


class Fail(Verdict):
    """End the job as `failed`, without another attempt."""

    def __init__(self, reason: str = "") -> None:
        self.reason = _reason(reason) or "the handler gave up"
        super().__init__(self.reason)


def _reason(value: object) -> str:
    """Return the reason as text; a reason of a wrong type must not prevent the verdict."""
    return value if isinstance(value, str) else "" if value is None else quoted(value)
