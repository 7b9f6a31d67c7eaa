"""The steps of start(): make the data, start watcher and postmaster, wait for the server."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from taskd.config import Settings
from taskd.embedded import last_user
from taskd.embedded.binaries import Binaries, clean_environment, find_binaries
from taskd.embedded.data_directory import (
    SOCKET,
    Runner,
    check_reach,
    choose_runner,
    socket_directory,
)
from taskd.embedded.locks import Patience, held, log_size, open_owned
from taskd.errors import EmbeddedError

USER = "taskd"
DATABASE = "taskd"
PORT = 5432
LOG_BYTES_MAX = 10 * 1024 * 1024

# The first start writes these settings into postgresql.conf, so that ALTER SYSTEM can override
# them.
SETTINGS = {
    # The database user has the same name as taskd's default schema. With "$user" in the path, new
    # tables of users would be created in taskd's schema.
    "search_path": "public",
    "shared_buffers": "64MB",
    "max_connections": "100",
    "max_wal_size": "256MB",
    "min_wal_size": "32MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # Two lines per checkpoint would fill the log, which is truncated only at a start.
    "log_checkpoints": "off",
}
# The other values of io_method need further processes or io_uring.
SETTINGS_SINCE = {18: {"io_method": "sync"}}
NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def data_major(home: Path) -> int | None:
    """Return the major version of the data; None if there is no data yet."""
    try:
        return int((home / "data/PG_VERSION").read_text())
    except FileNotFoundError:
        return None


def launch(
    home: Path,
    settings: Settings,
    locks: tuple[int, int, int],
    options: dict[str, str],
    linger_s: float,
) -> Path:
    """Start a server.

    Args:
        home: the directory of the server.
        settings: the settings, which choose the programs to use.
        locks: the descriptors of start.lock, server.lock and watch.lock. This process holds these
            locks, so no other server uses the files in `home`.
        options: settings of PostgreSQL for this run only.
        linger_s: how long the watcher waits after the last user.

    Returns:
        The directory of the socket.

    Raises:
        EmbeddedError: the data, the programs or the user cannot be used; the message says why.
    """
    start_fd, server_fd, watch_fd = locks
    major = data_major(home)
    if major is None and (home / "data").exists():
        raise EmbeddedError(f"{home / 'data'} is not a PostgreSQL data directory: move it away")
    binaries = find_binaries(settings, major)
    runner = choose_runner(home)
    check_reach(runner, binaries.directory / "postgres", home / "data")
    if major is None:
        _initialise(home, start_fd, binaries, runner, durable=not options)
    host = socket_directory(home)
    # A killed server leaves these files, and the pids in them can belong to other processes now.
    for debris in (home / "data/postmaster.pid", host / SOCKET, host / f"{SOCKET}.lock"):
        debris.unlink(missing_ok=True)
    ids = [str(-1 if i is None else i) for i in (runner.uid, runner.gid)]
    command = [*runner.prefix, *_postgres(binaries, home, host, options)]
    arguments = ["watch", str(linger_s), str(host / SOCKET)]
    spawn(home, arguments, [watch_fd, server_fd], [*ids, *command])
    return host


def _postgres(binaries: Binaries, home: Path, host: Path, options: dict[str, str]) -> list[str]:
    """Return the command line of postgres, with settings that ALTER SYSTEM must not override."""
    quoted = str(host).replace('"', '""')
    settings = {
        "listen_addresses": "",
        "port": str(PORT),
        "unix_socket_directories": f'"{quoted}"',
        "unix_socket_permissions": "0700",
        **options,
    }
    command = [str(binaries.directory / "postgres"), "-D", str(home / "data")]
    for name, value in settings.items():
        command += ["-c", f"{name}={value}"]
    return command


def _initialise(
    home: Path, start_fd: int, binaries: Binaries, runner: Runner, *, durable: bool
) -> None:
    """Make the data in another directory, and rename this directory.

    So a killed initdb leaves no broken data in `home`.
    """
    fresh = home / "data.new"
    if fresh.exists():
        shutil.rmtree(fresh)

    def run(name: str, *arguments: str, text: str = "") -> None:
        _run(runner, start_fd, [str(binaries.directory / name), *arguments], text)

    # The collation provider `builtin` sorts independently of libc. PostgreSQL has this provider
    # since version 17.
    builtin = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8")
    locale = ("--encoding=UTF8", "--locale=C", *(builtin if binaries.major >= 17 else ()))
    names = ("--auth=trust", f"--username={USER}", "--no-instructions")
    run("initdb", "-D", str(fresh), "--no-sync", *locale, *names)
    _write_settings(fresh / "postgresql.conf", binaries.major)
    # Without exit_on_error, single-user mode exits with 0 even if a statement failed.
    single = ("--single", "-F", "-c", "exit_on_error=on", "-D", str(fresh), "postgres")
    run("postgres", *single, text=f"CREATE DATABASE {DATABASE};\n")
    if durable:
        run("initdb", "-D", str(fresh), "--sync-only")
    fresh.rename(home / "data")
    if durable:
        _sync(home)


def _run(runner: Runner, start_fd: int, command: list[str], text: str) -> None:
    """Run a program, and wait for its end.

    The program inherits start.lock: if this process is killed, no other process can start a server
    before the program has ended.
    """
    done = subprocess.run(  # noqa: S603 - no shell, the programs that were looked up
        [*runner.prefix, *command],
        input=text, text=True, errors="replace", capture_output=True, check=False,
        cwd="/", env=clean_environment(), pass_fds=(start_fd,), umask=0o077,
        user=runner.uid, group=runner.gid, extra_groups=None if runner.uid is None else (),
    )  # fmt: skip
    if done.returncode != 0:
        reason = _reason(done.stdout + done.stderr)
        raise EmbeddedError(
            f"{command[0]} failed to make the database: {reason}; "
            "set TASKD_DSN to use another PostgreSQL"
        )


def _sync(directory: Path) -> None:
    """Flush a directory, so that a rename in it survives a power failure."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_settings(path: Path, major: int) -> None:
    settings = dict(SETTINGS)
    for since, more in SETTINGS_SINCE.items():
        if major >= since:
            settings |= more
    lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
    with os.fdopen(open_owned(path, os.O_WRONLY | os.O_APPEND), "w") as file:
        file.writelines(["\n# taskd; ALTER SYSTEM overrides these\n", *lines])


def spawn(home: Path, what: list[str], fds: list[int], rest: list[str] | None = None) -> None:
    """Run last_user.py with these descriptors, in a new session. Its output goes to the log."""
    log = open_owned(home / "log", os.O_WRONLY | os.O_APPEND)
    log_from = os.fstat(log).st_size
    try:
        if what[0] == "watch" and log_from > LOG_BYTES_MAX:
            os.ftruncate(log, 0)
            log_from = 0
        numbers = [str(fd) for fd in fds]
        file = str(Path(last_user.__file__).resolve())
        command = [what[0], str(home), *what[1:], *numbers, *(rest or ())]
        keep_ld = {k: v for k, v in os.environ.items() if k.startswith("LD_")}
        # last_user.py forks, and the parent exits, so this call returns soon, and leaves no child.
        # Code of the app that waits for any child could reap such a child.
        done = subprocess.run(  # noqa: S603 - no shell, the programs that were looked up
            [sys.executable, "-I", "-S", file, *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=fds, check=False,
            start_new_session=True, cwd="/", env=keep_ld | clean_environment(),
        )  # fmt: skip
    finally:
        os.close(log)
    if done.returncode != 0:
        raise EmbeddedError(f"the watcher did not start: {log_reason(home, log_from)}")


def adopt(home: Path, host: Path, watch_fd: int, linger_s: float) -> None:
    """Start a new watcher for a running server whose watcher was killed.

    Args:
        watch_fd: the descriptor of watch.lock, which this process holds.
    """
    spawn(home, ["adopt", str(linger_s), str(host / SOCKET)], [watch_fd])


def check_programs(home: Path) -> None:
    """Check that the programs of a running server still exist.

    Sessions of the server load libraries from the installation of these programs.

    Raises:
        EmbeddedError: the programs were removed.
    """
    try:
        command = (home / "data/postmaster.opts").read_text(errors="surrogateescape")
    except FileNotFoundError:  # the server is starting, and has not written the file yet
        return
    program = Path(command.split(' "-D"', 1)[0])
    if not program.exists():
        raise EmbeddedError(
            f"the embedded PostgreSQL in {home} runs, but its programs are gone ({program}). "
            "Run `taskd db stop`; the next start uses the programs that are installed now"
        )


def wait_ready(home: Path, host: Path, patience: Patience) -> bool:
    """Wait until the server accepts connections; return False if the server has ended.

    Raises:
        EmbeddedError: the log of the server has not grown for the `deadline_s` of `patience`.
    """
    while not _ready(home, host):
        if not held(home / "server.lock"):
            return False
        patience.wait(f"the embedded PostgreSQL in {home} has not become ready")
    return True


def _ready(home: Path, host: Path) -> bool:
    try:
        lines = (home / "data/postmaster.pid").read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return False
    if len(lines) < 8 or lines[7].strip() != "ready":
        return False
    # If the postmaster was killed, postmaster.pid stays, and backends can still hold server.lock.
    # So also check that a process listens on the socket.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(1)
        try:
            peer.connect(str(host / SOCKET))
        except OSError:
            return False
    return True


def log_reason(home: Path, offset: int) -> str:
    """Return why the server failed, as the log says after the first `offset` bytes."""
    log = home / "log"
    with log.open("rb") as file:
        file.seek(offset if offset <= log_size(log) else 0)  # another start can have truncated it
        text = file.read(64 * 1024).decode(errors="replace")
    if not text.strip() and shutil.disk_usage(home).free < 1024 * 1024:
        return f"no space is left on the disk of {home}"
    return f"{_reason(text)} (log: {log})"


def _reason(text: str) -> str:
    """Return the first of the most severe errors in a text; if there is none, the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for mark in ("PANIC:", "FATAL:", "ERROR:", "error:"):
        for line in lines:
            if mark in line:
                return line.split(mark, 1)[1].strip()
    return lines[-1] if lines else "it wrote nothing"
