"""Translate connection parameters of libpq into arguments of asyncpg.connect, sockets and TLS.

In this module, `words` maps the names of these parameters (`host`, `sslmode` ...) to their values.

If there are several hosts, taskd passes them to the driver one at a time. The driver has one time
limit for all of its hosts together, so a first host that does not answer (a dead machine, a cut
network) would leave no time for the second one.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from taskd.config import connection_words, user_of_process
from taskd.config.libpq_words import OF_CONNECTION
from taskd.errors import ConfigError

# TCP keepalive finds a dead peer 10 + 3 * 5 s after its last packet. With the kernel's defaults,
# this would take over two hours. TCP_USER_TIMEOUT is in milliseconds.
KEEPALIVE: Mapping[str, tuple[str, int]] = {
    "TCP_KEEPIDLE": ("keepalives_idle", 10),
    "TCP_KEEPALIVE": ("keepalives_idle", 10),  # the name of TCP_KEEPIDLE on macOS
    "TCP_KEEPINTVL": ("keepalives_interval", 5),
    "TCP_KEEPCNT": ("keepalives_count", 3),
    "TCP_USER_TIMEOUT": ("tcp_user_timeout", 20_000),
}
CONNECT_TIMEOUT_MAX_S = 60.0
# Parameters that are arguments of the driver, and parameters that the driver reads only from a DSN.
_ARGUMENTS = {
    "dbname": "database", "gsslib": "gsslib", "krbsrvname": "krbsrvname", "passfile": "passfile",
    "password": "password", "user": "user",
}  # fmt: skip
_IN_DSN = (
    "sslcert", "sslcrl", "sslkey", "sslpassword", "sslrootcert", "ssl_max_protocol_version",
    "ssl_min_protocol_version",
)  # fmt: skip
VERIFIED = ("require", "verify-ca", "verify-full")
ADVICE = "Correct the path, or remove the parameter."


def words_of(connect_args: Mapping[str, Any]) -> dict[str, str]:
    """Return libpq's parameters for arguments of asyncpg.connect: `dsn`, `host`, `user` ...

    Raises:
        ConfigError: the DSN, a service or a PG* variable has a parameter that taskd cannot honour.
    """
    words = connection_words(connect_args["dsn"]) if connect_args.get("dsn") else {}
    named = {**{word: word for word in ("host", "port")}, **_ARGUMENTS}
    for word, name in named.items():
        if connect_args.get(name) is not None:
            words[word] = str(connect_args[name])
    if connect_args.get("ssl") is False:
        words["sslmode"] = "disable"
    if "hostaddr" in words:
        words["host"] = words.pop("hostaddr")
    if "user" not in words:
        words["user"] = user_of_process()
    words.setdefault("dbname", words["user"])
    return words


def addresses(words: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the driver's arguments that select each host; without a host, only the port."""
    ports = words.get("port", "").split(",")
    hosts = words.get("host", "").split(",")
    if len(ports) == 1:  # as in libpq, a single port applies to all hosts
        ports *= len(hosts)
    found = [
        ({"host": host} if host else {}) | ({"port": int(port)} if port else {})
        for host, port in zip(hosts, ports, strict=True)
    ]
    if words.get("load_balance_hosts") == "random":
        random.shuffle(found)
    return found


def arguments(words: Mapping[str, str]) -> dict[str, Any]:
    """Return the driver's arguments that are the same for all hosts, without server settings.

    Each call reads the certificate files, because they can be replaced.

    Raises:
        ConfigError: a file of a certificate or a key cannot be used.
    """
    found: dict[str, Any] = {arg: words[word] for word, arg in _ARGUMENTS.items() if word in words}
    if words.get("sslnegotiation") == "direct":
        found["direct_tls"] = True
    if _by_sockets(words):
        return found
    in_dsn = {word: words[word] for word in _IN_DSN if word in words}
    if in_dsn:
        found["dsn"] = f"postgresql:///?{urlencode(in_dsn)}"
    context = _checked_tls(words)
    if words.get("sslrootcert") == "system":
        found["ssl"] = context
    elif "sslmode" in words:
        found["ssl"] = words["sslmode"]
    return found


def server_settings(words: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that libpq does not know: they are settings of the session."""
    return {word: value for word, value in words.items() if word not in OF_CONNECTION}


def connect_timeout_s(words: Mapping[str, str]) -> float | None:
    """Return the time limit for each host, in seconds, or None if taskd's default applies."""
    given = float(words.get("connect_timeout", 0))
    return min(given, CONNECT_TIMEOUT_MAX_S) or None


def keepalive(words: Mapping[str, str]) -> dict[str, int]:
    """Return the options of TCP sockets by their names in the module `socket`."""
    off = words.get("keepalives") == "0"
    return {
        option: int(words.get(word, default))
        for option, (word, default) in KEEPALIVE.items()
        if not (off and word.startswith("keepalives")) and words.get(word) != "0"
    }


def _by_sockets(words: Mapping[str, str]) -> bool:
    hosts = words.get("host", "").split(",")
    return all(host.startswith("/") for host in hosts)


def _checked_tls(words: Mapping[str, str]) -> ssl.SSLContext:
    """Load the certificate files, so that an error names the file; return the TLS context.

    The driver uses this context only for the certificate authorities of the system, because it
    cannot load them itself. Otherwise the driver loads the certificate files itself.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    mode = words.get("sslmode")
    if mode in VERIFIED:
        root = words.get("sslrootcert")
        if root == "system":
            context.load_default_certs()
        elif root is not None:
            with _reading(words, "sslrootcert"):
                context.load_verify_locations(cafile=root)
        elif mode != "require" and not (default := _default("root.crt")).is_file():
            raise ConfigError(
                f"sslmode={mode} needs certificates of authorities, and {default} does not exist. "
                "Add sslrootcert=system for a server with a publicly signed "
                "certificate, otherwise sslrootcert=FILE with the file of the provider."
            )
        if "sslcrl" in words:
            with _reading(words, "sslcrl"):
                context.load_verify_locations(cafile=words["sslcrl"])
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
    if "sslcert" in words and mode != "disable":
        key = words.get("sslkey") or next(filter(Path.is_file, [_default("postgresql.key")]), None)
        with _reading(words, "sslcert", "sslkey"):
            context.load_cert_chain(words["sslcert"], key, lambda: words.get("sslpassword", ""))
    if "ssl_min_protocol_version" in words:
        context.minimum_version = _version(words["ssl_min_protocol_version"])
    if "ssl_max_protocol_version" in words:
        context.maximum_version = _version(words["ssl_max_protocol_version"])
    context.set_alpn_protocols(["postgresql"])  # required by sslnegotiation=direct
    return context


class _reading:  # noqa: N801 - a context manager, named as suppress and closing are
    """Raise an error about the files of these parameters as a ConfigError that names the file."""

    def __init__(self, words: Mapping[str, str], *names: str) -> None:
        self._files = {name: Path(words[name]) for name in names if name in words}

    def __enter__(self) -> None:
        for name, path in self._files.items():
            try:
                path.open("rb").close()
            except OSError as error:
                why = (error.strerror or "").lower()
                raise ConfigError(
                    f"the file of {name}, {path.absolute()}, cannot be read: {why}. {ADVICE}"
                ) from None

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, ssl.SSLError):
            files = " with ".join(f"{path.absolute()} ({n})" for n, path in self._files.items())
            why = "no PEM certificate, or not the key of the certificate"
            raise ConfigError(f"TLS cannot use {files}: {error.reason or why}. {ADVICE}") from None


def _version(name: str) -> ssl.TLSVersion:
    return ssl.TLSVersion[name.replace(".", "_")]


def _default(name: str) -> Path:
    """Return the path of this file that libpq and the driver use by default."""
    try:
        return Path.home() / ".postgresql" / name
    except (RuntimeError, KeyError):  # this user has no home directory
        return Path("~/.postgresql") / name
