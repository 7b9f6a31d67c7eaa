"""Canaries: a password and a payload that must never be seen in what taskd prints or logs.

The password is in every DSN that tests use (where the server asks for none), so it is looked for in
whatever a test prints, in all events of workers in this process, and in what commands and `taskd
run` print in processes of their own. The payload is in the arguments of jobs in
tests/worker/test_security.py and tests/cli/test_roles.py, and looked for in the same places.
"""

from __future__ import annotations

import re

PASSWORD = "canary-p4ssw0rd"
PAYLOAD = "canary-p4yload"


def with_canary(dsn: str) -> str:
    """The DSN with this password, unless it has one."""
    return re.sub(r"(?<=://)([^:@/]+)@", rf"\1:{PASSWORD}@", dsn, count=1)


def assert_unseen(text: object) -> None:
    """Neither of them is in what was printed, logged or said."""
    said = str(text)
    for canary in (PASSWORD, PAYLOAD):
        at = said.find(canary)
        assert at < 0, f"{canary} was told: ...{said[max(0, at - 200) : at + 60]}"
