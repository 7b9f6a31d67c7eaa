"""Read the settings from files, the environment and flags."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from taskd.config.dsn import check_dsn, dsn_parameters, dsn_text, has_password
from taskd.config.parsing import task_prefix as parse_prefix
from taskd.config.secrets import open_to_others
from taskd.config.settings import Settings
from taskd.errors import ConfigError

# Variables that begin with TASKD_ and are not settings. They are set by a parent process for its
# children, by run_command for its commands, by Kubernetes for a service named taskd, and by
# developers for tests.
NO_SETTINGS = re.compile(
    r"TASKD_(CHILD|TEST_DSN|SERVICE_(HOST|PORT)(_\w+)?|PORT(_\w+)?"
    r"|JOB_ID|ATTEMPT|MAX_ATTEMPTS|IDEMPOTENCY_KEY)"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and the source of each value, by name.

    Attributes:
        ignored: a warning for each variable that looks like a setting and is not one.
        exposed: a warning for each file with a secret to which other users have access.
    """

    settings: Settings
    sources: Mapping[str, str]
    ignored: tuple[str, ...] = ()
    exposed: tuple[str, ...] = ()


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Loaded:
    """Read the settings from all sources.

    Args:
        flags: values from the command line; None counts as not given.
        environ: the environment variables; by default those of this process.
        directory: the directory of taskd.toml and pyproject.toml; by default the current one.

    Raises:
        ConfigError: a source cannot be read, or a key or a value is wrong; the message names the
            source.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    directory = directory or Path.cwd()
    settings = {each.name: each for each in fields(Settings)}
    for source, given in (
        *_files(directory),
        ("environment", _environment(environ)),
        ("flag", {k: v for k, v in (flags or {}).items() if v is not None}),
    ):
        for name, raw in given.items():
            if name not in settings:
                raise ConfigError(f"{source}: there is no setting {name!r}; see `taskd config`")
            values[name] = _parsed(name, raw, settings[name].metadata["parse"], source)
            sources[name] = _source_name(source, name)
            # `dsn` and `dsn_file` set the same value. The one from the source with the higher
            # precedence applies, and sources are read in ascending precedence.
            if name == "dsn":
                values.pop("dsn_file", None)
            if name == "dsn_file":
                values.pop("dsn", None)
    if "dsn" not in values:
        values.update(_dsn_elsewhere(values.get("dsn_file"), environ, sources))
    return Loaded(
        Settings(**values),
        {name: sources.get(name, "default") for name in settings},
        tuple(_ignored(environ)),
        tuple(_exposed(values, sources, directory, environ)),
    )


def task_prefix() -> str | None:
    """Return the setting `task_prefix`, or None if it is not set.

    Tasks need this setting when their module is imported. The function reads no other setting, so
    that a wrong value of another setting does not make the import fail.

    Raises:
        ConfigError: the value is wrong, or the file of the setting cannot be read.
    """
    raw, source = os.environ.get("TASKD_TASK_PREFIX"), "environment"
    if not raw:
        try:
            raw, source = _prefix_in_files(Path.cwd())
        except FileNotFoundError:  # the current directory was deleted
            return None
    return None if raw is None else _parsed("task_prefix", raw, parse_prefix, source)


@lru_cache(maxsize=8)
def _prefix_in_files(directory: Path) -> tuple[Any, str]:
    found = [
        (content["task_prefix"], source)
        for source, content in _files(directory)
        if "task_prefix" in content
    ]
    return found[-1] if found else (None, "")


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
            # If pyproject.toml has no settings of taskd, an error in it must not stop taskd.
            if name == "taskd.toml" or b"tool.taskd" in written:
                raise ConfigError(f"{path}: {error}") from None
            continue
        if name == "pyproject.toml":
            tool = content.get("tool")
            content = tool.get("taskd", {}) if isinstance(tool, dict) else {}
            if not isinstance(content, dict):
                raise ConfigError(f"{path}: tool.taskd is not a table of settings")
        found.append((name, content))
    return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    # An empty variable counts as not set: compose files and systemd units often contain empty ones.
    return {name: environ[each] for each, name in _variables().items() if environ.get(each)}


def _variables() -> dict[str, str]:
    """Map the name of each environment variable to the name of its setting."""
    return {f"TASKD_{each.name.upper()}": each.name for each in fields(Settings)}


def _ignored(environ: Mapping[str, str]) -> Iterator[str]:
    # An unknown key in a file is an error, but an unknown variable can belong to another program.
    settings = _variables()
    for name in sorted(environ):
        if not name.startswith("TASKD_") or name in settings or NO_SETTINGS.fullmatch(name):
            continue
        import difflib

        word = name.removeprefix("TASKD_").lower()
        near = difflib.get_close_matches(word, settings.values(), n=1)
        meant = f" Did you mean TASKD_{near[0].upper()}?" if near else ""
        yield f"{name} is not a setting, and is ignored.{meant}"


def _exposed(
    values: Mapping[str, Any],
    sources: Mapping[str, str],
    directory: Path,
    environ: Mapping[str, str],
) -> Iterator[str]:
    """Yield a warning for each file with a secret to which other users have access."""
    files = []
    if values.get("dsn_file") and has_password(values["dsn"]):
        files.append(values["dsn_file"])
    key = dsn_parameters(values.get("dsn") or "postgresql://").get("sslkey") or environ.get(
        "PGSSLKEY"
    )
    if key:
        files.append(Path(key))
    if values.get("web_password_file"):
        files.append(values["web_password_file"])
    for each in fields(Settings):
        value, source = values.get(each.name), sources.get(each.name, "")
        in_file = value is not None and source.endswith(f".toml ({each.name})")
        # If a value is displayed in another form than it has, the value contains a secret.
        if in_file and each.metadata["show"](value) != value:
            files.append(directory / source.removesuffix(f" ({each.name})"))
    for path in dict.fromkeys(files):
        if open_to_others(path):
            yield f"other users can read {path}, which contains a secret: chmod 600 {path}"


def _dsn_elsewhere(
    dsn_file: Path | None, environ: Mapping[str, str], sources: dict[str, str]
) -> dict[str, Any]:
    """Return `dsn`, and `dsn_file` if the DSN was read from a file; record the source in `sources`.

    The DSN comes from the first of these sources that is given: `dsn_file`, a systemd credential
    named dsn, DATABASE_URL, libpq's variables. If none of them is given, the result is empty.
    """
    credential = Path(environ.get("CREDENTIALS_DIRECTORY", "")) / "dsn"
    if dsn_file is None and environ.get("CREDENTIALS_DIRECTORY") and _may_be_file(credential):
        dsn_file = credential
        sources["dsn_file"] = "CREDENTIALS_DIRECTORY"
    if dsn_file is not None:
        source = f"{sources.get('dsn_file', 'dsn_file')} {dsn_file}"
        dsn = read_dsn(dsn_file, source)
        sources["dsn"] = source
        return {"dsn": dsn, "dsn_file": dsn_file}
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


def read_dsn(path: Path, source: str) -> str:
    """Return the DSN that a file contains.

    Args:
        source: the description of the file for an error message.

    Raises:
        ConfigError: the file cannot be read, or its content is not a DSN.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: it cannot be read: {error}") from None
    dsn: str = _parsed("dsn", text, dsn_text, source)
    return dsn


def _may_be_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return True  # the caller reads the file, and reports why the file cannot be read
