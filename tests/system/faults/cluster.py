"""A PostgreSQL cluster of the test's own, which may be stopped, killed, promoted and filled up."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import asyncpg

from taskd import config
from taskd.embedded.binaries import clean_environment, find_binaries
from taskd.embedded.data_directory import choose_runner

WITHIN_S = 60.0
# No power is cut here, so what the kernel has taken is safe without fsync; everything else is as
# as on servers in production.
SETTINGS = {
    "fsync": "off",
    "shared_buffers": "32MB",
    "max_wal_size": "128MB",
    "min_wal_size": "32MB",
    "timezone": "UTC",
    "log_min_messages": "log",
    "unix_socket_permissions": "0777",
}


def free_port() -> int:
    """Return a port on which no program listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class _Made:
    """The data that initdb has made, once per process; copied for each cluster."""

    directory: tempfile.TemporaryDirectory[str] | None = None


class Cluster:
    """One server with one database `taskd`, reached over its socket and over TCP on the loopback.

    Args:
        home: its directory, which this class makes; short, as the path of the socket is limited.
        settings: further settings of the server.
    """

    def __init__(self, home: Path, settings: Mapping[str, str] | None = None) -> None:
        home.mkdir(mode=0o700, exist_ok=True)
        self.home, self.data, self.port = home, home / "data", free_port()
        self._binaries = find_binaries(config.load().settings)
        self._runner = choose_runner(home)
        self._settings = SETTINGS | dict(settings or {})
        self._process: asyncio.subprocess.Process | None = None

    def dsn(self, database: str = "taskd") -> str:
        """By the socket."""
        return f"postgresql://taskd@/{database}?host={self.home}&port={self.port}"

    def tcp_dsn(self, port: int | None = None, host: str = "127.0.0.1") -> str:
        """Return the DSN over TCP: directly, or at the port of a proxy."""
        return f"postgresql://taskd@{host}:{port or self.port}/taskd?sslmode=disable"

    async def make(self) -> None:
        """A fresh cluster, started, with its database."""
        fresh = _Made.directory
        if fresh is None:
            fresh = _Made.directory = tempfile.TemporaryDirectory(
                prefix="taskd-initdb-", dir="/tmp"
            )
            twin = Cluster(Path(fresh.name))
            await twin._run("initdb", "-D", str(twin.data), "--no-sync", "--auth=trust",
                            "--username=taskd", "--encoding=UTF8", "--locale=C")  # fmt: skip
            with (twin.data / "pg_hba.conf").open("a") as rules:
                rules.write("host all all all trust\nhost replication all all trust\n")
        await self._run("cp", "-a", f"{fresh.name}/data", str(self.data), directory=Path("/bin"))
        await self.start()
        await self.ask("CREATE DATABASE taskd", database="postgres")

    async def start(self) -> None:
        """Start it; returns when it takes connections."""
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        settings = self._settings | {
            "port": str(self.port),
            "listen_addresses": self._settings.get("listen_addresses", "127.0.0.1"),
            "unix_socket_directories": str(self.home),
        }
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with (self.home / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._runner.prefix, str(self._binaries.directory / "postgres"),
                "-D", str(self.data), *options, env=clean_environment(),
                stdout=log, stderr=log, **self._as_user(),
            )  # fmt: skip
        async with asyncio.timeout(WITHIN_S):
            while not self._accepts():
                assert self._process.returncode is None, (self.home / "log").read_text()[-2000:]
                await asyncio.sleep(0.002)

    def _accepts(self) -> bool:
        """The postmaster writes its state to the last line of its pid file."""
        with suppress(OSError, IndexError):
            lines = (self.data / "postmaster.pid").read_text().splitlines()
            return lines[0] == str(self.pid) and lines[7].strip() in {"ready", "standby"}
        return False

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the postmaster is there."""
        return self._process is not None and self._process.returncode is None

    async def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """Stop it: SIGQUIT is `-m immediate`, SIGINT `-m fast`."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.send_signal(how)
        async with asyncio.timeout(WITHIN_S):
            await self._process.wait()

    async def kill(self) -> None:
        """As if its machine were gone: every process of it at once, with SIGKILL."""
        assert self._process is not None
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for pid in (self.pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._process.wait()

    async def ask(self, text: str, *args: object, database: str = "taskd") -> list[asyncpg.Record]:
        """Run one statement over a connection of its own."""
        connection = await asyncpg.connect(
            self.dsn(database), timeout=10, server_settings={"application_name": "judge cluster"}
        )
        try:
            return await connection.fetch(text, *args)
        finally:
            await connection.close()

    async def standby(self, home: Path, *, name: str) -> Cluster:
        """A second server that streams from this one."""
        twin = Cluster(home, self._settings)
        source = f"host={self.home} port={self.port} user=taskd application_name={name}"
        options = ("-R", "--checkpoint=fast", "--no-sync", "-d", source)
        await self._run("pg_basebackup", "-D", str(twin.data), *options, runner_of=twin)
        await twin.start()
        return twin

    async def _run(
        self,
        program: str,
        *args: str,
        runner_of: Cluster | None = None,
        directory: Path | None = None,
    ) -> None:
        who = runner_of or self
        process = await asyncio.create_subprocess_exec(
            *who._runner.prefix, str((directory or self._binaries.directory) / program), *args,
            env=clean_environment(), stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, **who._as_user(),
        )  # fmt: skip
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()

    def _as_user(self) -> dict[str, int]:
        who = {"user": self._runner.uid, "group": self._runner.gid}
        return {name: number for name, number in who.items() if number is not None}

    async def close(self) -> None:
        """End the server, in any state."""
        if self._process is not None and self._process.returncode is None:
            await self.kill()


@asynccontextmanager
async def private(
    settings: Mapping[str, str] | None = None, *, home: Path | None = None
) -> AsyncIterator[Cluster]:
    """A cluster for the length of a block."""
    base = home or Path(tempfile.mkdtemp(prefix="taskd-faults-", dir="/tmp"))
    cluster = Cluster(base / "a", settings)
    try:
        await cluster.make()
        yield cluster
    finally:
        await cluster.close()
        if home is None:
            shutil.rmtree(base, ignore_errors=True)
