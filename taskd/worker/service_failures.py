"""What fails again and again in a worker, although the database answers: one object per worker.

A service that tries again a moment later hides a fault that no retry mends, such as a missing right
or a table without a key. So a failure that lasts is logged, and stored in the worker's row, where
`taskd health`, `taskd workers` and `taskd doctor` read it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from taskd import events

# From then on a failure is no coincidence, such as a deadlock.
LASTING_S = 10.0
# Without another failure for this long, what failed works. The pruner tries again every minute.
FORGOTTEN_AFTER_S = 180.0
STORED_MAX, ERROR_CHARS_MAX = 20, 500


class Lasting(NamedTuple):
    """A failure that lasts; `began_at` as in time.monotonic()."""

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
    """Counts failures of services in a row, and reports those that last."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def failed(self, service: str, error: str) -> None:
        """Count a failure; log it if it lasts."""
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
        """End a series of failures."""
        failure = self._failures.pop(service, None)
        if failure is not None and failure.reported:
            events.service_recovered(service, time.monotonic() - failure.began_at)

    def lasting(self) -> list[Lasting]:
        """Return the failures that last, the oldest first."""
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
