"""The parameters of libpq for a connection: from the DSN, a service, and environment variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from taskd.config.dsn import dsn_parameters
from taskd.config.libpq_parameters import OF_OTHER_CLIENTS, VARIABLES, check_parameters
from taskd.errors import ConfigError


def connection_parameters(dsn: str) -> dict[str, str]:
    """Return the parameters of a checked DSN, completed by its service and by PG* variables.

    As in libpq, the DSN overrides the service, and the service overrides the variables.

    Raises:
        ConfigError: a service cannot be found, or taskd cannot honour a parameter.
    """
    parameters = dsn_parameters(dsn)
    given = _variables(os.environ)
    service = parameters.pop("service", None) or given.get("service")
    file = parameters.pop("servicefile", None) or given.get("servicefile")
    of_service = {} if service is None else _service(service, file)
    used = {
        keyword: value
        for keyword, value in given.items()
        if keyword not in parameters
        and keyword not in of_service
        and not keyword.startswith("service")
    }
    for keyword, value in used.items():
        _check({keyword: value} if keyword != "port" else {}, VARIABLES[keyword])
    found = used | of_service | parameters
    _check(found, "the DSN with its service and PG* variables")
    return _verified(found)


def _check(parameters: Mapping[str, str], source: str) -> None:
    try:
        check_parameters(parameters)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    # An empty variable counts as not set, as in libpq.
    return {keyword: environ[name] for keyword, name in VARIABLES.items() if environ.get(name)}


def _service(name: str, file: str | None) -> dict[str, str]:
    """Return the parameters that libpq's service file contains for a service."""
    import configparser

    searched = [Path(file)] if file else list(_service_files())
    for path in searched:
        # No interpolation: a password can contain `%`.
        parser = configparser.RawConfigParser(
            delimiters=("=",), comment_prefixes=("#",), strict=False, default_section=""
        )
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        try:
            parser.read_string(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, configparser.Error) as error:
            raise ConfigError(f"the service file {path} cannot be read: {_why(error)}") from None
        if parser.has_section(name):
            parameters = {
                "dbname" if keyword == "database" else keyword: v
                for keyword, v in parser.items(name)
            }
            _check(parameters, f"the service {name!r} of {path}")
            return {w: v for w, v in parameters.items() if v and w not in OF_OTHER_CLIENTS}
    if not searched:
        raise ConfigError(
            f"the service {name!r} was not found: no file was searched, because this user has no "
            "home directory. Name the file with PGSERVICEFILE."
        )
    places = " or ".join(map(str, searched))
    raise ConfigError(
        f"there is no service {name!r} in {places}. Correct PGSERVICE or `service` of the DSN, or "
        "name the file with PGSERVICEFILE."
    )


def _why(error: Exception) -> str:
    # The text of a parser's error quotes a line of the file, which can contain a password.
    return error.strerror or "" if isinstance(error, OSError) else type(error).__name__


def _service_files() -> Iterator[Path]:
    with contextlib.suppress(RuntimeError, KeyError):  # this user has no home directory
        yield Path.home() / ".pg_service.conf"
    if os.environ.get("PGSYSCONFDIR"):
        yield Path(os.environ["PGSYSCONFDIR"]) / "pg_service.conf"


def _verified(parameters: dict[str, str]) -> dict[str, str]:
    """Return the parameters, with `sslmode=verify-full` if they require a verified certificate."""
    mode = parameters.get("sslmode")
    if parameters.get("channel_binding") == "require" and mode != "verify-full":
        # Channel binding protects against an attacker between the client and the server. The driver
        # does not support channel binding, but verification of the server's certificate gives the
        # same protection.
        hosts = parameters.get("host", parameters.get("hostaddr", "/")).split(",")
        if mode == "disable" or any(host.startswith("/") for host in hosts):
            raise ConfigError(
                "channel_binding=require needs TLS, and this connection has none (sslmode=disable, "
                "a socket, or no host). Remove channel_binding from the DSN."
            )
        return parameters | {
            "sslmode": "verify-full",
            "sslrootcert": parameters.get("sslrootcert", "system"),
        }
    if parameters.get("sslrootcert") == "system":
        if mode not in (None, "verify-full"):
            raise ConfigError(
                f"sslrootcert=system needs sslmode=verify-full, and sslmode is {mode}: anybody can "
                "have a certificate of a public authority, so the host name must be verified."
            )
        return parameters | {"sslmode": "verify-full"}
    return parameters


def user_of_process() -> str:
    """Return the name of the user of this process, the default of libpq's parameter `user`.

    Raises:
        ConfigError: the user has no name, as in a container with `--user 54321`.
    """
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        uid = os.getuid() if hasattr(os, "getuid") else "unknown"
        raise ConfigError(
            f"the DSN names no user, and the user of this process (uid {uid}) has no name. Name "
            "the user in the DSN, postgresql://user@host/database, or set PGUSER."
        ) from None
