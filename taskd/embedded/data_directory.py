"""The home of the server (its data, log and locks), and the user that runs the server."""

from __future__ import annotations

import functools
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from taskd.config import Settings
from taskd.embedded.binaries import clean_environment, find_binaries
from taskd.errors import EmbeddedError

SOCKET = ".s.PGSQL.5432"
# The address of a unix socket has 104 bytes on macOS and 108 on Linux, including a final zero byte.
SOCKET_PATH_BYTES = 103
ROOT_HOME = Path("/var/lib/taskd")


@dataclass(frozen=True, slots=True)
class Runner:
    """The user that runs initdb and postgres, which refuse to run as root.

    Attributes:
        prefix: the command that runs another command in a user namespace; empty if no namespace is
            used.
        uid, gid: the ids that root changes to; None if the user of this process runs the server.
    """

    prefix: tuple[str, ...] = ()
    uid: int | None = None
    gid: int | None = None


def default_home(settings: Settings) -> Path:
    """Return the home `pg<major>` in `data_dir`, or in the data directory of the user.

    The major version is `pg_major`. If that is not set, it is the newest version that has data: a
    newer wheel must not start with an empty database. If no version has data, it is the version of
    the installation that find_binaries() returns.

    Raises:
        EmbeddedError: this user has no data directory; or no home has data, and no installation
            was found.
    """
    given = settings.data_dir
    directory = _data_directory() if given is None else given.expanduser().absolute()
    major_wanted = settings.pg_major
    if major_wanted is None:
        homes = [p.parent.parent.name[2:] for p in directory.glob("pg*/data/PG_VERSION")]
        major_wanted = max((int(n) for n in homes if n.isdecimal()), default=None)
    return directory / f"pg{major_wanted or find_binaries(settings).major}"


def _data_directory() -> Path:
    shared = Path(os.environ.get("XDG_DATA_HOME", ""))
    if shared.is_absolute():
        return shared / "taskd"
    root = os.geteuid() == 0
    if root and not os.environ.get("HOME"):
        return ROOT_HOME
    try:
        directory = Path.home() / ".local/share/taskd"
    except RuntimeError:  # no HOME and no passwd entry
        directory = Path()
    if not directory.is_absolute():
        raise EmbeddedError("this user has no home directory: set TASKD_DATA_DIR, or TASKD_DSN")
    # If root cannot make user namespaces, as in many containers, another user must run the server.
    # That user cannot enter the HOME of root if HOME is closed to others.
    if root and not _namespaces() and _closed_to_others(directory):
        return ROOT_HOME
    return directory


def make_home(home: Path) -> None:
    """Make the home and its missing parents with mode 0700; existing directories do not change.

    Directories that root makes get the owner of the directory above them. So a run with sudo does
    not lock users out of their own home. If that owner is root, and root cannot make user
    namespaces, the new owner is the user that must run the server.

    Raises:
        EmbeddedError: the home belongs to another user, other users can write to the home or
            replace it, or no user can run the server for root.
        OSError: a directory cannot be made.
    """
    missing = [p for p in (home, *home.parents) if not p.exists()]
    for directory in reversed(missing):
        above = directory.parent.stat()
        directory.mkdir(mode=0o700, exist_ok=True)
        if os.geteuid() == 0:
            uid, gid = above.st_uid, above.st_gid
            if uid == 0 and not _namespaces():
                user = _unprivileged()
                uid, gid = user.pw_uid, user.pw_gid
            os.chown(directory, uid, gid, follow_symlinks=False)
    found = home.stat()
    if os.geteuid() not in (0, found.st_uid):
        raise EmbeddedError(f"{home} belongs to {_name(found.st_uid)}: set TASKD_DATA_DIR")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise EmbeddedError(f"{home} can be written by others: chmod 700 it, or set TASKD_DATA_DIR")
    # In a directory without the sticky bit, every user who can write to it can replace the home.
    for parent in home.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise EmbeddedError(
                f"every user can replace {home}, because every user can write to {parent}: "
                f"chmod o-w {parent}, or set TASKD_DATA_DIR"
            )


def choose_runner(home: Path) -> Runner:
    """Return the user that runs the server of this home.

    Raises:
        EmbeddedError: this process is root, the home belongs to root, and root cannot make user
            namespaces.
    """
    me, owner = os.geteuid(), home.stat()
    if me != 0:
        # initdb fails if its user has no name. In a user namespace, the user has the name `nobody`.
        return Runner() if _name(me) != str(me) else Runner(prefix=_namespaces())
    if owner.st_uid != 0:
        return Runner(uid=owner.st_uid, gid=owner.st_gid)
    if _namespaces():
        # In the namespace, the user is not root but still owns root's files: no chown is needed.
        return Runner(prefix=_namespaces())
    raise EmbeddedError(
        f"{home} belongs to root, PostgreSQL refuses to run as root, and this kernel forbids user "
        "namespaces. Run chown -R to give the directory to another user, or set TASKD_DSN"
    )


def check_reach(runner: Runner, *paths: Path) -> None:
    """If root changes to another user to run the server, check that this user can reach the paths.

    Raises:
        EmbeddedError: a path cannot be reached; the message names the first closed directory.
    """
    if runner.uid is None:
        return
    for path in paths:
        closed = closed_directory(path, runner.uid, runner.gid)
        if closed:
            raise EmbeddedError(
                f"PostgreSQL cannot run as root, and {_name(runner.uid)} cannot reach {path}: "
                f"{closed} is closed to that user. Set TASKD_DATA_DIR and TASKD_PG_BIN to "
                "directories that the user can enter, or set TASKD_DSN"
            )


def closed_directory(path: Path, uid: int, gid: int | None) -> Path | None:
    """Return the first directory above the path that this user cannot enter, or None.

    Directories that do not exist yet are ignored.
    """
    for directory in reversed(path.parents):
        if not directory.exists():
            return None
        found = directory.stat()
        mine, group = found.st_uid == uid, found.st_gid == gid
        if not found.st_mode & (0o100 if mine else 0o010 if group else 0o001):
            return directory
    return None


def socket_directory(home: Path) -> Path:
    """Return the directory of the socket: the home, or a directory in /tmp.

    The home cannot be used if its path is too long for the address of a socket, or contains a
    comma. Clients read a host with a comma in a DSN as a list of hosts.

    Raises:
        EmbeddedError: the path in /tmp is not a private directory of the owner of the home.
    """
    if len(os.fsencode(home / SOCKET)) <= SOCKET_PATH_BYTES and "," not in str(home):
        return home
    owner = home.stat()
    digest = hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
    # Use /tmp and not $TMPDIR, because $TMPDIR can differ in another shell. Other users can predict
    # the name and make the directory first, so check the owner and the mode of the directory.
    directory = Path(f"/tmp/taskd-{owner.st_uid}-{digest}")  # noqa: S108
    try:
        directory.mkdir(mode=0o700)
    except FileExistsError:
        pass
    else:
        os.chown(directory, owner.st_uid, owner.st_gid, follow_symlinks=False)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner.st_uid or found.st_mode & 0o077:
        raise EmbeddedError(
            f"{directory}, where the socket of {home} must be, is not a private directory of "
            f"{_name(owner.st_uid)}: remove it, or set TASKD_DATA_DIR to a short path"
        )
    return directory


def _namespaces() -> tuple[str, ...]:
    """Return the command that enters a user namespace; empty if user namespaces cannot be made."""
    return _probe_namespaces(shutil.which("unshare"))


@functools.cache
def _probe_namespaces(unshare: str | None) -> tuple[str, ...]:
    if unshare is None:
        return ()
    probe = subprocess.run(  # noqa: S603 - no shell, a fixed command
        [unshare, "-U", "true"], env=clean_environment(), capture_output=True, check=False
    )
    return (unshare, "-U") if probe.returncode == 0 else ()


def _closed_to_others(directory: Path) -> bool:
    user = _unprivileged()
    return closed_directory(directory, user.pw_uid, user.pw_gid) is not None


def _unprivileged() -> pwd.struct_passwd:
    for name in ("taskd", "postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedError(
        "PostgreSQL cannot run as root, this kernel forbids user namespaces, and there is no "
        "user taskd, postgres or nobody: run as another user, or set TASKD_DSN"
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
