"""DSNs: check them, split them into parameters of libpq, and hide their passwords.

A DSN is a URI (`postgresql://user@host/database?sslmode=require`) or libpq's keyword form
(`host=... dbname=...`). libpq_parameters.py says which parameters taskd supports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, unquote

from taskd.config.libpq_parameters import OF_OTHER_CLIENTS, check_parameters

DEFAULT_PORT = "5432"
DSN_SCHEME = re.compile(r"(postgres|postgresql)(\+[a-z0-9_]+)?", re.IGNORECASE)
HOST_AND_PORT = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::(\d{0,5}))?")
KEYWORD = re.compile(r"(\w+)\s*=\s*(?:'((?:[^'\\]|\\.)*)'|((?:[^\s'\\]|\\.)*))(?=\s|$)\s*")
ADO_NET = re.compile(r"(?i)(server|host)\s*=[^\s;']*;")
SSLMODES = {"true": "require", "false": "disable"}
AS_URI = "write it as postgresql://user@host/database"


def dsn_text(value: Any) -> str:
    """Check the text of a value with check_dsn(), and return the result."""
    return check_dsn(str(value))


def check_dsn(dsn: str) -> str:
    """Return the DSN as a URI that taskd and psql accept.

    The scheme becomes `postgresql`, without `+driver`. Parameters of other clients are removed.

    Raises:
        ValueError: the scheme, a host, a port or a parameter is wrong. The message never contains
            the DSN.
    """
    dsn = dsn.strip()
    scheme, separator, rest = dsn.partition("://")
    if not separator or "=" in scheme:
        return _uri(_keywords(dsn))
    if not DSN_SCHEME.fullmatch(scheme):
        raise ValueError(_other_scheme(scheme))
    if re.search(r"\s", rest):
        raise ValueError("it contains a space: write it as %20")
    place, mark, query = rest.partition("?")
    kept = "&".join(_kept(query)) if mark else ""
    checked = f"postgresql://{place}{'?' if kept else ''}{kept}"
    check_parameters(dsn_parameters(checked))
    return checked


def _other_scheme(scheme: str) -> str:
    only = "taskd supports only postgresql://"
    if scheme.lower() == "jdbc:postgresql":
        return f"its scheme is {scheme!r}; {only}: remove `jdbc:`"
    # Show only text that has the form of a scheme. Other text before `://` can be a part of a
    # password.
    shown = f"its scheme is {scheme!r}" if scheme.replace("+", "").isalnum() else "it has no scheme"
    return f"{shown}; {only}"


def _kept(query: str) -> Iterator[str]:
    """Yield the parameters without those of other clients; `ssl` becomes `sslmode`."""
    for field in filter(None, query.split("&")):
        name, separator, value = field.partition("=")
        if not separator:
            # Do not name the parameter: it can be a part of a password that contains `?`.
            raise ValueError("a parameter after the `?` has no value: write name=value")
        if name == "ssl":  # the name that JDBC and SQLAlchemy use
            yield f"sslmode={SSLMODES.get(value, value)}"
        elif name not in OF_OTHER_CLIENTS:
            yield field


def dsn_parameters(dsn: str) -> dict[str, str]:
    """Return the parameters of a checked DSN, by keyword.

    As in libpq, a parameter after the `?` overrides the value of the same keyword before the `?`.

    Raises:
        ValueError: a host or port cannot be read.
    """
    rest = dsn.partition("://")[2]
    authority = _authority(rest)
    path, _, query = rest.removeprefix(authority).partition("?")
    login, _, hosts = authority.rpartition("@")
    user, _, password = login.partition(":")
    pairs = [_host_and_port(each) for each in hosts.split(",")]
    # Check the login here: PostgreSQL's error about an unescaped password contains a part of the
    # password.
    if set("@[]") & set(login) or None in pairs:
        raise ValueError(
            "its host or port cannot be read; in a password write @ / ? # [ as %40 %2F %3F ..."
        )
    ports = ",".join(pair[1] for pair in pairs if pair)
    found = {
        "user": user,
        "password": password,
        "host": ",".join(pair[0] for pair in pairs if pair),
        "port": ports if ports.strip(",") else "",
        "dbname": path.lstrip("/"),
    }
    for field in filter(None, query.split("&")):
        name, _, value = field.partition("=")
        found["dbname" if name == "database" else unquote(name)] = value
    return {keyword: unquote(value) for keyword, value in found.items() if value}


def _host_and_port(text: str) -> tuple[str, str] | None:
    match = HOST_AND_PORT.fullmatch(text)
    if match is None or int(match[2] or 0) > 65535:
        return None
    return match[1].strip("[]"), match[2] or ""


def _keywords(dsn: str) -> dict[str, str]:
    """Return the values of a DSN in libpq's keyword form."""
    if ADO_NET.match(dsn):
        raise ValueError(f"it is a connection string of ADO.NET; {AS_URI}")
    found: dict[str, str] = {}
    name, position = "", 0
    while position < len(dsn):
        match = KEYWORD.match(dsn, position)
        if match is None:
            break
        value = match[3] if match[2] is None else match[2]
        name = match[1]
        found[name] = re.sub(r"\\(.)", r"\1", value)
        position = match.end()
    if not found:
        raise ValueError(f"it has no scheme; {AS_URI}")
    if position < len(dsn):
        raise ValueError(
            f"it cannot be read after `{name}=...`: separate parameters by spaces, write a value "
            f"with spaces in quotes ('), or {AS_URI}"
        )
    return found


def _uri(parameters: Mapping[str, str]) -> str:
    """Return parameters of libpq as a URI."""
    parameters = {
        keyword: value for keyword, value in parameters.items() if keyword not in OF_OTHER_CLIENTS
    }
    check_parameters(parameters)
    plain = re.fullmatch(r"[\w.-]+", parameters.get("host", "")) is not None
    aside = {"user", "password", "dbname"} | ({"host", "port"} if plain else set())
    login = quote(parameters.get("user", ""), safe="")
    if "password" in parameters:
        login += ":" + quote(parameters["password"], safe="")
    place = parameters["host"] if plain else ""
    if plain and "port" in parameters:
        place += ":" + parameters["port"]
    query = "&".join(f"{w}={quote(v, safe='/,:')}" for w, v in parameters.items() if w not in aside)
    uri = f"postgresql://{login}{'@' if login else ''}{place}/{quote(parameters.get('dbname', ''))}"
    return uri + ("?" + query if query else "")


def _authority(rest: str) -> str:
    """Return the part between the scheme and the database: user, password and hosts."""
    return re.split(r"[/?#]", rest, maxsplit=1)[0]


def hide_password(dsn: str) -> str:
    """Return a DSN, or a text that contains one, with the password masked."""
    # Mask up to the last @: a password can contain @, and masking too much does no harm.
    masked = re.sub(r"(://[^:/@\s]*):\S*@", r"\1:***@", dsn)
    return re.sub(r"(?i)(password\s*=\s*)('(?:[^'\\]|\\.)*'|(?:[^&\s\\]|\\.)+)", r"\1***", masked)


def has_password(dsn: str) -> bool:
    """Return whether a DSN contains a password."""
    _, _, password = _authority(dsn.partition("://")[2]).rpartition("@")[0].partition(":")
    return bool(password) or re.search(r"password\s*=", dsn) is not None
