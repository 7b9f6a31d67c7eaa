"""Count lasting failures: services that fail repeatedly although the database answers.

Services retry after each failure. This hides faults that a retry cannot repair, such as a missing
right or a table without a key. So a failure that lasts is logged and stored in the worker's row,
where `taskd health`, `taskd workers` and `taskd doctor` read it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from taskd import events

# A shorter series of failures can be chance, such as deadlocks.
LASTING_S = 10.0
# A series ends if no failure follows for this long. The pruner retries its steps every minute.
FORGOTTEN_AFTER_S = 180.0
STORED_MAX, ERROR_CHARS_MAX = 20, 500


class Lasting(NamedTuple):
    """A lasting failure of a service, or of a step of the pruner.

    Attributes:
        error: the text of the last error.
        began_at: when the series of failures began (time.monotonic).
    """

    service: str
    error: str
    began_at: float


class _Failure:
    def __init__(self, now: float) -> None:
        self.began_at = self.last_at = now
        self.count = 0
        self.error = ""
        self.reported = False


class Failures:
    """Counts the consecutive failures of each service, and reports the lasting ones."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def failed(self, service: str, error: str) -> None:
        """Count a failure; log the series once, when it has lasted for LASTING_S."""
        now = time.monotonic()
        self._forget(now)
        failure = self._failures.setdefault(service, _Failure(now))
        failure.last_at, failure.error = now, error[:ERROR_CHARS_MAX]
        failure.count += 1
        if failure.reported or failure.count < 2 or now - failure.began_at < LASTING_S:
            return
        failure.reported = True
        events.service_failing(service, failure.error, failure.count, now - failure.began_at)

    def worked(self, service: str) -> None:
        """End the service's series of failures, if there is one."""
        failure = self._failures.pop(service, None)
        if failure is not None and failure.reported:
            events.service_recovered(service, time.monotonic() - failure.began_at)

    def lasting(self) -> list[Lasting]:
        """Return the lasting failures, the oldest first, at most STORED_MAX."""
        self._forget(time.monotonic())
        found = [
            Lasting(service, each.error, each.began_at)
            for service, each in self._failures.items()
            if each.reported
        ]
        return sorted(found, key=lambda each: each.began_at)[:STORED_MAX]

    def _forget(self, now: float) -> None:
        for service, each in list(self._failures.items()):
            if now - each.last_at > FORGOTTEN_AFTER_S:
                self.worked(service)
