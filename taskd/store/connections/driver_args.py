"""Translate connection parameters of libpq: into arguments of asyncpg, sockets, and TLS contexts.

If there are several hosts, taskd passes them to the driver one at a time. The driver has one time
limit for all of its hosts together. So a first host that does not answer (a dead machine, a cut
network) would leave no time for the second one.
"""

from __future__ import annotations

import random
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from taskd.config import connection_parameters, user_of_process
from taskd.config.libpq_parameters import OF_CONNECTION
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
# _ARGUMENTS: parameters that are arguments of the driver, with the driver's names. _IN_DSN:
# parameters that the driver reads only from a DSN.
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


def parameters_of(connect_args: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of libpq for arguments of asyncpg.connect: `dsn`, `host`, `user` ...

    Raises:
        ConfigError: the DSN, a service or a PG* variable has a keyword that taskd cannot honour.
    """
    parameters = connection_parameters(connect_args["dsn"]) if connect_args.get("dsn") else {}
    named = {**{keyword: keyword for keyword in ("host", "port")}, **_ARGUMENTS}
    for keyword, name in named.items():
        if connect_args.get(name) is not None:
            parameters[keyword] = str(connect_args[name])
    if connect_args.get("ssl") is False:
        parameters["sslmode"] = "disable"
    if "hostaddr" in parameters:
        parameters["host"] = parameters.pop("hostaddr")
    if "user" not in parameters:
        parameters["user"] = user_of_process()
    parameters.setdefault("dbname", parameters["user"])
    return parameters


def addresses(parameters: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the driver's arguments that select each host; without a host, only the port."""
    ports = parameters.get("port", "").split(",")
    hosts = parameters.get("host", "").split(",")
    if len(ports) == 1:  # as in libpq, a single port applies to all hosts
        ports *= len(hosts)
    found = [
        ({"host": host} if host else {}) | ({"port": int(port)} if port else {})
        for host, port in zip(hosts, ports, strict=True)
    ]
    if parameters.get("load_balance_hosts") == "random":
        random.shuffle(found)
    return found


def arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the driver's arguments that are the same for all hosts, without server settings.

    Each call reads the certificate files, because they can be replaced.

    Raises:
        ConfigError: a file of a certificate or a key cannot be used.
    """
    found: dict[str, Any] = {
        arg: parameters[keyword] for keyword, arg in _ARGUMENTS.items() if keyword in parameters
    }
    if parameters.get("sslnegotiation") == "direct":
        found["direct_tls"] = True
    if _by_sockets(parameters):
        return found
    in_dsn = {keyword: parameters[keyword] for keyword in _IN_DSN if keyword in parameters}
    if in_dsn:
        found["dsn"] = f"postgresql:///?{urlencode(in_dsn)}"
    context = _checked_tls(parameters)
    if parameters.get("sslrootcert") == "system":
        found["ssl"] = context
    elif "sslmode" in parameters:
        found["ssl"] = parameters["sslmode"]
    return found


def server_settings(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters that libpq does not know; they are settings of the server's session."""
    return {keyword: value for keyword, value in parameters.items() if keyword not in OF_CONNECTION}


def connect_timeout_s(parameters: Mapping[str, str]) -> float | None:
    """Return the time limit for each host, in seconds; None: taskd's default applies."""
    given = float(parameters.get("connect_timeout", 0))
    return min(given, CONNECT_TIMEOUT_MAX_S) or None


def keepalive(parameters: Mapping[str, str]) -> dict[str, int]:
    """Return the options of TCP sockets by their names in the module `socket`."""
    off = parameters.get("keepalives") == "0"
    return {
        option: int(parameters.get(keyword, default))
        for option, (keyword, default) in KEEPALIVE.items()
        if not (off and keyword.startswith("keepalives")) and parameters.get(keyword) != "0"
    }


def _by_sockets(parameters: Mapping[str, str]) -> bool:
    hosts = parameters.get("host", "").split(",")
    return all(host.startswith("/") for host in hosts)


def _checked_tls(parameters: Mapping[str, str]) -> ssl.SSLContext:
    """Load the certificate files, so that an error names the file; return the TLS context.

    The driver uses this context only for the certificate authorities of the system, because it
    cannot load them itself. Otherwise the driver loads the certificate files itself.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    mode = parameters.get("sslmode")
    if mode in VERIFIED:
        root = parameters.get("sslrootcert")
        if root == "system":
            context.load_default_certs()
        elif root is not None:
            with _reading(parameters, "sslrootcert"):
                context.load_verify_locations(cafile=root)
        elif mode != "require" and not (default := _default("root.crt")).is_file():
            raise ConfigError(
                f"sslmode={mode} needs certificates of authorities, and {default} does not exist. "
                "Add sslrootcert=system for a server with a publicly signed "
                "certificate, otherwise sslrootcert=FILE with the file of the provider."
            )
        if "sslcrl" in parameters:
            with _reading(parameters, "sslcrl"):
                context.load_verify_locations(cafile=parameters["sslcrl"])
                context.verify_flags |= ssl.VERIFY_CRL_CHECK_CHAIN
    if "sslcert" in parameters and mode != "disable":
        key = parameters.get("sslkey") or next(
            filter(Path.is_file, [_default("postgresql.key")]), None
        )
        with _reading(parameters, "sslcert", "sslkey"):
            context.load_cert_chain(
                parameters["sslcert"], key, lambda: parameters.get("sslpassword", "")
            )
    if "ssl_min_protocol_version" in parameters:
        context.minimum_version = _version(parameters["ssl_min_protocol_version"])
    if "ssl_max_protocol_version" in parameters:
        context.maximum_version = _version(parameters["ssl_max_protocol_version"])
    context.set_alpn_protocols(["postgresql"])  # required by sslnegotiation=direct
    return context


class _reading:  # noqa: N801 - a context manager, named as suppress and closing are
    """Raise an error about the files of these parameters as a ConfigError that names the file."""

    def __init__(self, parameters: Mapping[str, str], *names: str) -> None:
        self._files = {name: Path(parameters[name]) for name in names if name in parameters}

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
