"""Canaries: a password and a payload that must never appear in the output or the log of taskd.

The password is in every DSN that tests use (where the server requires none), so it is searched in
all output of a test, in all events of workers in this process, and in the output of commands and
`taskd run` in processes of their own. The payload is in the arguments of jobs in
tests/worker/test_security.py and tests/cli/test_roles.py, and searched in the same places.
"""

from __future__ import annotations

import re

PASSWORD = "canary-p4ssw0rd"
PAYLOAD = "canary-p4yload"


def with_canary(dsn: str) -> str:
    """The DSN with this password, unless it has one."""
    return re.sub(r"(?<=://)([^:@/]+)@", rf"\1:{PASSWORD}@", dsn, count=1)


def assert_unseen(text: object) -> None:
    """Check that neither of them was printed or logged."""
    said = str(text)
    for canary in (PASSWORD, PAYLOAD):
        at = said.find(canary)
        assert at < 0, f"{canary} was told: ...{said[max(0, at - 200) : at + 60]}"
