"""Settings: each declared once, with its default, unit and help.

From a declaration come the key in `[tool.taskd]` of pyproject.toml or in taskd.toml, the variable
`TASKD_<NAME>`, the row of `taskd config` and the row of the reference. Later sources win:
defaults < files < environment < flags.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from taskd.errors import ConfigError

DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, None: 1.0}
DSN_SCHEME = re.compile(r"(postgres|postgresql)(\+[a-z0-9_]+)?", re.IGNORECASE)
HOST_AND_PORT = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::(\d{0,5}))?")
DEFAULT_PORT = "5432"
LOG_LEVELS = ("debug", "info", "warning", "error")
PG_MAJOR_OLDEST = 15
# What else begins with TASKD_: what a parent tells its children, the suite's own server, and what
# Kubernetes tells every container about a service that is named taskd.
# And what run_command tells its commands, one of which may be taskd.
NO_SETTINGS = re.compile(
    r"TASKD_(CHILD|TEST_DSN|SERVICE_(HOST|PORT)(_\w+)?|PORT(_\w+)?"
    r"|JOB_ID|ATTEMPT|MAX_ATTEMPTS|IDEMPOTENCY_KEY)"
)


def parse_duration_s(text: str) -> float:
    """Seconds of `30s`, `5m`, `1.5h`, `250ms`, `7d`, or of a bare number.

    Raises:
        ValueError: it is none of these.
    """
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 30s, 5m or 2h")
    return float(match[1]) * SECONDS_PER_UNIT[match[2]]


def _seconds(low: float, high: float = 86400.0 * 365) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        seconds = parse_duration_s(value) if isinstance(value, str) else float(value)
        if not (math.isfinite(seconds) and low <= seconds <= high):
            raise ValueError(f"{value!r} is not between {low:g} s and {high:g} s")
        return seconds

    return parse


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        try:
            number = int(str(value))
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise ValueError(f"{value!r} is not a whole number from {low} to {high}")
        return number

    return parse


def _one_of(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is none of {', '.join(choices)}")
        return str(value)

    return parse


def _address(value: Any) -> str:
    text = str(value).strip()
    if text == "off":
        return text
    match = re.fullmatch(r"(?:(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]@]*):)?(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ValueError(f"{text!r} is neither off, a port such as 9090, nor host:port")
    return f"{match[1] or '127.0.0.1'}:{int(match[2])}"


def _url(value: Any) -> str:
    parts = urlsplit(str(value).strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"{value!r} is not https://host, without a path")
    return f"{parts.scheme}://{parts.netloc}"


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(str(part).strip() for part in parts if str(part).strip())


def _networks(value: Any) -> tuple[str, ...]:
    names = _names(value)
    for name in names:
        ipaddress.ip_network(name, strict=False)
    return names


def _table(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        import json

        value = json.loads(value)
    if not isinstance(value, dict):
        raise ValueError("it is a table by name, or in the environment a JSON object")  # noqa: TRY004
    return value


def _dsn(value: Any) -> str:
    return check_dsn(str(value))


def check_dsn(dsn: str) -> str:
    """The DSN as PostgreSQL's drivers take it: `postgresql+driver://` loses its driver.

    Raises:
        ValueError: another scheme. The DSN itself is never part of the message.
    """
    scheme, separator, rest = dsn.strip().partition("://")
    if not separator:
        if "=" in dsn:
            raise ValueError("write it as postgresql://user@host/database, not as key=value pairs")
        raise ValueError("it has no scheme; write it as postgresql://user@host/database")
    if not DSN_SCHEME.fullmatch(scheme):
        raise ValueError(f"its scheme is {scheme!r}; taskd speaks postgresql:// only")
    return f"postgresql://{_readable(rest)}"


def _readable(rest: str) -> str:
    # The driver's own complaint about an unescaped password quotes a part of it.
    place = _place(rest)
    user, at, hosts = place.rpartition("@")
    matches = [m for m in map(HOST_AND_PORT.fullmatch, hosts.split(",")) if m]
    unread = len(matches) < hosts.count(",") + 1 or any(int(m[2] or 0) > 65535 for m in matches)
    if set("@[]") & set(user) or unread:
        raise ValueError(
            "its host or port cannot be read; in a password write @ / ? # [ as %40 %2F %3F ..."
        )
    if len(matches) == 1 or "[" not in hosts:
        return rest
    # Since CVE-2025-0938 was mended Python's urlsplit(), which the driver asks too, refuses a
    # bracket that is not where the hosts begin. PostgreSQL takes a list of them by name as well.
    path, _, query = rest.removeprefix(place).partition("?")
    told = ["host=" + ",".join(m[1].strip("[]") for m in matches)]
    if any(m[2] for m in matches):
        told.append("port=" + ",".join(m[2] or DEFAULT_PORT for m in matches))
    return f"{user}{at}{path or '/'}?{'&'.join([*told, *filter(None, [query])])}"


def _place(rest: str) -> str:
    # User, password and hosts: what stands between the scheme and the database.
    return re.split(r"[/?#]", rest, maxsplit=1)[0]


def hide_password(dsn: str) -> str:
    """The DSN with its password masked, for people and logs."""
    # Up to the last @: a password may hold one, and hiding too much is the safe mistake.
    return re.sub(
        r"(?i)(password=)[^&\s]+", r"\1***", re.sub(r"(://[^:/@\s]*):\S*@", r"\1:***@", dsn)
    )


def setting(
    default: Any,
    help_text: str,
    parse: Callable[[Any], Any],
    *,
    secret: bool = False,
) -> Any:
    """Declare a setting: its default, its help, how its value is read, whether it is ever shown."""
    return field(default=default, metadata={"help": help_text, "parse": parse, "secret": secret})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set. Durations are in seconds and end in `_s`."""

    dsn: str | None = setting(
        None,
        "The PostgreSQL to use: postgresql://user@host/database. Without it, taskd starts its own.",
        _dsn,
        secret=True,
    )
    dsn_file: Path | None = setting(None, "A file that holds the DSN, and nothing else.", Path)
    listen_dsn: str | None = setting(
        None, "A direct DSN for LISTEN when the DSN leads to a pooler.", _dsn, secret=True
    )
    embedded: str = setting(
        "auto",
        "auto: without a DSN, start the embedded PostgreSQL. off: refuse to run instead.",
        _one_of("auto", "off"),
    )
    data_dir: Path | None = setting(
        None, "Where the embedded PostgreSQL lives; the user's data directory by default.", Path
    )
    pg_bin: Path | None = setting(
        None,
        "The bin directory of the embedded PostgreSQL's programs; looked for by default.",
        Path,
    )
    pg_major: int | None = setting(
        None,
        "The major version of the embedded PostgreSQL; that of its data, or the newest by default.",
        _whole(PG_MAJOR_OLDEST, 99),
    )
    app: str | None = setting(None, "The module whose @task functions the worker runs.", str)
    queues: tuple[str, ...] = setting(
        (),
        "Queues to serve, `name` or `name:concurrency`; all queues of the app by default.",
        _names,
    )
    concurrency: int = setting(
        100, "Attempts that run at the same time, per queue and process.", _whole(1, 10_000)
    )
    processes: int = setting(
        1, "Processes that run jobs, 64 at most; more than one have a parent.", _whole(1, 64)
    )
    threads: int = setting(16, "Threads for plain `def` handlers, per process.", _whole(1, 1000))
    process_slots: int | None = setting(
        None,
        "Processes for handlers with process=True, per worker process; one per core by default.",
        _whole(1, 256),
    )
    process_jobs_max: int = setting(
        1000, "Attempts that such a process runs before another one replaces it.", _whole(1, 10**9)
    )
    transaction_connections: int = setting(
        4, "Connections for handlers with transaction=, per process.", _whole(1, 100)
    )
    drain_s: float = setting(
        25.0, "How long a stopping worker lets running attempts end.", _seconds(0.0, 86400.0)
    )
    cancel_s: float = setting(
        5.0,
        "How long cancelled attempts may take to end before they are abandoned.",
        _seconds(0.0, 3600.0),
    )
    lease_s: float = setting(
        30.0, "How long the claims of a silent worker are honoured.", _seconds(1.0, 3600.0)
    )
    poll_s: float = setting(
        5.0,
        "How often an idle queue is looked at without a notification, at most.",
        _seconds(0.1, 60.0),
    )
    statement_timeout_s: float = setting(
        5.0, "How long one statement of the worker may take.", _seconds(0.5, 60.0)
    )
    job_lines_per_s: int = setting(
        10,
        "Successes logged one by one per second; the others are counted in one line.",
        _whole(0, 100_000),
    )
    keep_logs: str = setting(
        "off",
        "Of which attempts what their handlers log is kept with the job: off, failed or all; "
        "a task may say otherwise.",
        _one_of("off", "failed", "all"),
    )
    log_level: str = setting("info", "debug, info, warning or error.", _one_of(*LOG_LEVELS))
    log_format: str = setting(
        "auto",
        "auto: readable on a terminal, JSON otherwise; or console, or json.",
        _one_of("auto", "console", "json"),
    )
    http: str = setting(
        "off",
        "Where a worker serves /livez, /readyz, /metrics and the dashboard: `host:port`, or a port "
        "of 127.0.0.1.",
        _address,
    )
    web_listen: str = setting(
        "127.0.0.1:8080",
        "Where `taskd web` serves the dashboard: `host:port`, or a port of 127.0.0.1.",
        _address,
    )
    web_url: str | None = setting(
        None,
        "Where browsers find the dashboard when a proxy stands before it: https://jobs.example.org.",
        _url,
    )
    web_proxies: tuple[str, ...] = setting(
        (),
        "Proxies before the dashboard, as addresses or networks: theirs are the X-Forwarded-For "
        "headers by which it tells apart who guesses passwords.",
        _networks,
    )
    web_password: str | None = setting(
        None,
        "The password of the dashboard, or what `taskd web --hash-password` made of it; "
        "without one it only shows.",
        str,
        secret=True,
    )
    web_password_file: Path | None = setting(
        None, "A file that holds it; or a line `name:scrypt:...` for each who may log in.", Path
    )
    smtp_host: str | None = setting(None, "The mail server; turns the task send_email on.", str)
    smtp_port: int | None = setting(
        None, "Its port: 25, or 587 with starttls, or 465 with tls by default.", _whole(1, 65535)
    )
    smtp_tls: str = setting(
        "auto",
        "auto: STARTTLS when the server offers it; or starttls (required), tls, off.",
        _one_of("auto", "starttls", "tls", "off"),
    )
    smtp_user: str | None = setting(None, "The user to log in as.", str)
    smtp_password: str | None = setting(None, "The password of that user.", str, secret=True)
    smtp_sender: str | None = setting(
        None, "The From address of mails; taskd@<host name> by default.", str
    )
    commands: dict[str, Any] | None = setting(
        None,
        "What run_command may run: tables by name, with argv; turns the task on. "
        "In the environment: JSON.",
        _table,
    )
    http_hosts: tuple[str, ...] = setting(
        (),
        "Where http_request may go: `hooks.example.org`, `*.example.org:8443`, `*`; turns it on.",
        _names,
    )
    http_networks: tuple[str, ...] = setting(
        (),
        "Networks that are not public and where http_request may go nevertheless: `10.1.0.0/16`.",
        _names,
    )
    http_secrets: dict[str, Any] | None = setting(
        None,
        "Secrets that sign requests, by name: `whsec_` and base64. In the environment: JSON.",
        _table,
        secret=True,
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings together with where each value came from, by name.

    Attributes:
        ignored: a sentence for each variable that looks like one of ours and is none.
    """

    settings: Settings
    sources: Mapping[str, str]
    ignored: tuple[str, ...] = ()


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Loaded:
    """Read the settings from all sources.

    Args:
        flags: values from the command line; None counts as not given.
        environ: the environment, the process's by default.
        directory: where taskd.toml and pyproject.toml are looked for, the current one by default.

    Raises:
        ConfigError: a value or a key is wrong; the message names it and its source.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    known = {each.name: each for each in fields(Settings)}
    for source, given in (
        *_files(directory or Path.cwd()),
        ("environment", _environment(environ)),
        ("flag", {k: v for k, v in (flags or {}).items() if v is not None}),
    ):
        for name, raw in given.items():
            if name not in known:
                raise ConfigError(f"{source}: there is no setting {name!r}; see `taskd config`")
            values[name] = _parsed(name, raw, known[name].metadata["parse"], source)
            sources[name] = _source_name(source, name)
            # A DSN and a file that holds one are one setting said in two ways: the later wins.
            if name == "dsn":
                values.pop("dsn_file", None)
            if name == "dsn_file":
                values.pop("dsn", None)
    if "dsn" not in values:
        values.update(_dsn_elsewhere(values.get("dsn_file"), environ, sources))
    return Loaded(
        Settings(**values),
        {name: sources.get(name, "default") for name in known},
        tuple(_ignored(environ)),
    )


def _parsed(name: str, raw: Any, parse: Callable[[Any], Any], source: str) -> Any:
    try:
        return parse(raw)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{_source_name(source, name)}: {error}") from None


def _source_name(source: str, name: str) -> str:
    if source == "environment":
        return f"TASKD_{name.upper()}"
    if source == "flag":
        return "--" + name.replace("_", "-")
    return f"{source} ({name})"


def _files(directory: Path) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for name in ("pyproject.toml", "taskd.toml"):
        path = directory / name
        try:
            written = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            continue
        try:
            content = tomllib.loads(written.decode())
        except (ValueError, RecursionError) as error:  # such as a number of 5,000 digits
            # A project's broken pyproject.toml is not ours to report, unless it speaks of taskd.
            if name == "taskd.toml" or b"tool.taskd" in written:
                raise ConfigError(f"{path}: {error}") from None
            continue
        if name == "pyproject.toml":
            tool = content.get("tool")
            content = tool.get("taskd", {}) if isinstance(tool, dict) else {}
            if not isinstance(content, dict):
                raise ConfigError(f"{path}: tool.taskd is no table of settings")
        found.append((name, content))
    return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    # An empty variable counts as not set, as compose files and units often have them.
    return {name: environ[each] for each, name in _variables().items() if environ.get(each)}


def _variables() -> dict[str, str]:
    """The settings' names, by the variables that set them."""
    return {f"TASKD_{each.name.upper()}": each.name for each in fields(Settings)}


def _ignored(environ: Mapping[str, str]) -> Iterator[str]:
    # Not refused, as a key in a file is: an environment is shared, and any of them may be another
    # program's own.
    known = _variables()
    for name in sorted(environ):
        if not name.startswith("TASKD_") or name in known or NO_SETTINGS.fullmatch(name):
            continue
        import difflib

        word = name.removeprefix("TASKD_").lower()
        near = difflib.get_close_matches(word, known.values(), n=1)
        meant = f" Did you mean TASKD_{near[0].upper()}?" if near else ""
        yield f"{name} is no setting, and is ignored.{meant}"


def _dsn_elsewhere(
    dsn_file: Path | None, environ: Mapping[str, str], sources: dict[str, str]
) -> dict[str, Any]:
    """The DSN from a file, a systemd credential, DATABASE_URL or libpq's own variables."""
    credential = Path(environ.get("CREDENTIALS_DIRECTORY", "")) / "dsn"
    if dsn_file is None and environ.get("CREDENTIALS_DIRECTORY") and _may_be_file(credential):
        dsn_file = credential
        sources["dsn_file"] = "CREDENTIALS_DIRECTORY"
    if dsn_file is not None:
        source = f"{sources.get('dsn_file', 'dsn_file')} {dsn_file}"
        try:
            text = dsn_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: it cannot be read: {error}") from None
        sources["dsn"] = source
        return {"dsn": _parsed("dsn", text, _dsn, source), "dsn_file": dsn_file}
    if environ.get("DATABASE_URL"):
        sources["dsn"] = "DATABASE_URL"
        try:
            return {"dsn": check_dsn(environ["DATABASE_URL"])}
        except ValueError as error:
            raise ConfigError(f"DATABASE_URL: {error}") from None
    if any(environ.get(name) for name in ("PGHOST", "PGDATABASE", "PGSERVICE")):
        sources["dsn"] = "PG* variables"
        return {"dsn": "postgresql://"}
    return {}


def _may_be_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return True  # to read it will say why it cannot be read


def has_password(dsn: str) -> bool:
    """Whether a DSN carries a password, which `ps` would show."""
    _, _, password = _place(dsn.partition("://")[2]).rpartition("@")[0].partition(":")
    return bool(password) or "password=" in dsn
