"""Logins: passwords, sessions, and limits on failed attempts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from taskd.config import Settings
from taskd.errors import ConfigError
from taskd.web.access.login_limits import network_of

PASSWORD_CHARS_MIN = 8
PASSWORD_BYTES_MAX = 1024
# scrypt: 32 MiB and some 80 ms per attempt.
SCRYPT_N, SCRYPT_R, SCRYPT_P = 2**15, 8, 1
SCRYPT_MEMORY_MAX = 64 * 2**20
HASH = re.compile(r"scrypt:([A-Za-z0-9+/=]{16,64}):([A-Za-z0-9+/=]{40,100})")
NAMED = re.compile(r"([A-Za-z0-9_.@-]{1,64}):(scrypt:\S+)")
# The hash to check for an unknown name, so that the check takes as long as for a known name.
NOBODY = f"scrypt:{base64.b64encode(bytes(16)).decode()}:{base64.b64encode(bytes(32)).decode()}"
# The name of the user if the setting is a single password without a name.
SOMEBODY = "admin"

SESSIONS_MAX = 100
SESSION_S = 24 * 3600.0
IDLE_S = 8 * 3600.0
# Maximum number of failures of one address within FAILURES_S. A successful login clears only the
# failures with the same user name. Otherwise, a user could guess the passwords of other users, and
# clear the failures by logging in.
FAILURES_MAX = 5
FAILURES_S = 60.0
# Maximum number of failures of all addresses together. Above this number, only passwords from
# addresses with an earlier login are checked.
FAILURES_IN_ALL_MAX = 50
ADDRESSES_MAX = 1000
# Maximum number of attempts whose passwords are being hashed, or wait to be hashed.
GUESSES_MAX = 8


def hashed(password: str, salt: bytes | None = None) -> str:
    """Return the hash of a password, for the settings."""
    salt = salt or secrets.token_bytes(16)
    key = hashlib.scrypt(
        password.encode()[: PASSWORD_BYTES_MAX + 1],
        salt=salt,
        n=SCRYPT_N,
        r=SCRYPT_R,
        p=SCRYPT_P,
        maxmem=SCRYPT_MEMORY_MAX,
        dklen=32,
    )
    return f"scrypt:{base64.b64encode(salt).decode()}:{base64.b64encode(key).decode()}"


def _is_right(password: str, stored: str) -> bool:
    match = HASH.fullmatch(stored)
    if match is None:
        return hmac.compare_digest(password.encode(), stored.encode())
    return hmac.compare_digest(hashed(password, base64.b64decode(match[1])), stored)


def read_passwords(settings: Settings) -> dict[str, str]:
    """Return passwords or hashes by user name (`admin` without names); empty without passwords.

    Raises:
        ConfigError: the file cannot be read, or a password is too short.
    """
    given, source = settings.web_password, "web_password"
    if settings.web_password_file is not None:
        source = str(settings.web_password_file)
        try:
            given = settings.web_password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"web_password_file: {source} cannot be read: {error}") from None
    if given is None:
        return {}
    lines = given.splitlines()
    named = [NAMED.fullmatch(line.strip()) for line in lines if line.strip()]
    if named and all(named):
        return _checked({match[1]: match[2] for match in named if match}, source)
    if len(lines) > 1:
        raise ConfigError(
            f"{source}: write one password, or one line `name:scrypt:...` per user; "
            "`taskd web --hash-password` prints the hash `scrypt:...`"
        )
    return _checked({SOMEBODY: given.strip()}, source)


def _checked(passwords: dict[str, str], source: str) -> dict[str, str]:
    for stored in passwords.values():
        if stored.startswith("scrypt:") and not HASH.fullmatch(stored):
            raise ConfigError(f"{source}: this is not a hash made by `taskd web --hash-password`")
        if len(stored) < PASSWORD_CHARS_MIN:
            raise ConfigError(f"{source}: use at least {PASSWORD_CHARS_MIN} characters")
    return passwords


class TooMany(Exception):
    """Too many failed logins; `wait_s`: seconds until the next attempt is allowed."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"too many attempts; wait {wait_s:.0f} s")
        self.wait_s = wait_s


class Logins:
    """Check passwords, with limits on failures.

    Failures from one address delay only that address. Failures from many addresses delay all
    addresses that have had no successful login since the process started.
    """

    def __init__(self, passwords: Mapping[str, str]) -> None:
        self._passwords = dict(passwords)
        self._failures: OrderedDict[str, deque[tuple[float, str]]] = OrderedDict()
        self._in_all: deque[float] = deque(maxlen=FAILURES_IN_ALL_MAX)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._waiting = 0
        self._one = asyncio.Lock()

    @property
    def names_needed(self) -> bool:
        """Return whether a name is required."""
        return set(self._passwords) != {SOMEBODY}

    async def check(self, name: str, password: str, address: str) -> str | None:
        """Return the user's name; None if the password is wrong.

        Raises:
            TooMany: too many logins from this address, or from all addresses together, have failed.
        """
        network = network_of(address)
        # Check the failures of all addresses first. An address that is refused here is not stored,
        # so it displaces no stored address.
        if network not in self._known:
            _limit(self._in_all, FAILURES_IN_ALL_MAX)
        failures = self._recent(network)
        _limit([at for at, _ in failures], FAILURES_MAX)
        if self._waiting >= GUESSES_MAX:
            raise TooMany(1.0)
        # Count the attempt before the check. Otherwise, any number of parallel attempts would be
        # checked.
        now = time.monotonic()
        name = name if self.names_needed else SOMEBODY
        stored = self._passwords.get(name)
        failures.append((now, "" if stored is None else name))
        self._in_all.append(now)
        self._waiting += 1
        try:
            async with self._one:
                right = await asyncio.to_thread(_is_right, password, stored or NOBODY)
        finally:
            self._waiting -= 1
        if not right or stored is None:
            return None
        others = [each for each in failures if each[1] != name]
        failures.clear()
        failures.extend(others)
        with contextlib.suppress(ValueError):
            self._in_all.remove(now)
        _remember(self._known, network, None)
        return name

    def _recent(self, network: str) -> deque[tuple[float, str]]:
        failures = self._failures.get(network, deque())
        _remember(self._failures, network, failures)
        while failures and failures[0][0] < time.monotonic() - FAILURES_S:
            failures.popleft()
        return failures


def _limit(failures: Sequence[float], most: int) -> None:
    """Raise TooMany if there were `most` failures within FAILURES_S."""
    left_s = failures[0] + FAILURES_S - time.monotonic() if len(failures) >= most else 0.0
    if left_s > 0:
        raise TooMany(max(1.0, left_s))


def _remember(kept: OrderedDict[str, Any], key: str, value: Any) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > ADDRESSES_MAX:
        kept.popitem(last=False)


@dataclass(slots=True)
class Session:
    """A logged-in user.

    Attributes:
        csrf: the token that each form must send to change something.
        notes: messages for the next page.
    """

    who: str
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    notes: list[str] = field(default_factory=list)
    born: float = field(default_factory=time.monotonic)
    seen: float = field(default_factory=time.monotonic)


class Sessions:
    """The sessions, in memory: a restart logs everyone out."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[bytes, Session] = OrderedDict()

    def begin(self, who: str) -> tuple[str, Session]:
        """Begin a session; return its token and the session.

        If there are more than SESSIONS_MAX sessions, end the session that has been idle longest.
        """
        token, session = secrets.token_urlsafe(32), Session(who)
        self._by_digest[_digest(token)] = session
        while len(self._by_digest) > SESSIONS_MAX:
            self._by_digest.popitem(last=False)
        return token, session

    def find(self, token: str | None, *, from_open_page: bool = False) -> Session | None:
        """Return the session of this token, unless it has expired.

        Args:
            from_open_page: whether an open page has sent the request by itself; such a request does
                not extend the session.
        """
        key = _digest(token or "")
        session = self._by_digest.get(key)
        if session is None:
            return None
        now = time.monotonic()
        if now - session.born > SESSION_S or now - session.seen > IDLE_S:
            del self._by_digest[key]
            return None
        if not from_open_page:
            session.seen = now
            self._by_digest.move_to_end(key)
        return session

    def end(self, token: str | None) -> None:
        """Log out."""
        self._by_digest.pop(_digest(token or ""), None)


def _digest(token: str) -> bytes:
    # Only hashes of tokens are kept, so that a memory dump contains no token. The time of a look-up
    # also reveals nothing about the tokens of other users.
    return hashlib.sha256(token.encode()).digest()
