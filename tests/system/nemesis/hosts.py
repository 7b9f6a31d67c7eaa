"""Hosts: worker processes that are started again, behind a line of their own to the database."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.faults.cluster import Cluster
from tests.system.faults.proxy import Proxy

ROOT = Path(__file__).parents[3]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.nemesis.app"),
    *("--queue", "fast:50", "--queue", "mixed:20", "--queue", "things:2", "--threads", "4"),
)
FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
AGAIN_S = 0.5
STOP_S = 60.0


@dataclass(slots=True)
class Notes:
    """What was done to which process and when, by this machine's clock; passed to the judge at the
    end."""

    kills: list[tuple[int, float]] = field(default_factory=list)
    pauses: list[tuple[int, float, float]] = field(default_factory=list)


class Host:
    """One host.

    Args:
        home: for logs, records and the file of its clock.
        settings: of its workers, as in taskd.config.

    Attributes:
        codes: exit codes of its processes, except for those that a fault has killed.
        surprises: processes that ended unexpectedly.
        busy: a lock that is held while a fault concerns this host.
        old_code: its code lacks the newest task and the newest schedule.
    """

    def __init__(
        self, name: str, home: Path, cluster: Cluster, notes: Notes, settings: dict[str, object]
    ) -> None:
        self.name, self.home, self.notes = name, home, notes
        self.proxy = Proxy("127.0.0.1", cluster.port)
        self.codes: Counter[int] = Counter()
        self.surprises: list[str] = []
        self.busy = asyncio.Lock()
        self.old_code = False
        self.clock = home / f"{name}.clock"
        self._cluster, self._settings = cluster, settings
        self._up = asyncio.Event()
        self._up.set()
        self._slots: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._killed: set[int] = set()
        self._asked: set[int] = set()
        self._stopping = False

    async def start(self, processes: int) -> None:
        """Start it; its workers come up on their own."""
        await self.proxy.start()
        self.set_clock(0.0)
        for slot in range(processes):
            await self._spawn(slot)
            self._keepers.append(
                asyncio.create_task(self._keep(slot), name=f"keeper:{self.name}:{slot}")
            )

    def set_clock(self, offset_s: float) -> None:
        """Let the wall clock of its processes be wrong by so much."""
        fresh = self.clock.with_suffix(".new")
        fresh.write_text(f"{offset_s:+.0f}\n")
        fresh.replace(self.clock)

    def _environment(self) -> dict[str, str]:
        settings = {
            "dsn": self._cluster.tcp_dsn(self.proxy.port),
            "log_format": "json",
            "job_lines_per_s": 0,
        } | self._settings
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
        made = kept | {f"TASKD_{name.upper()}": str(value) for name, value in settings.items()}
        made["JUDGE_RECORDS"] = str(self.home)
        if self.old_code:
            made["NEMESIS_OLD_CODE"] = "1"
        if FAKETIME:
            # The monotonic clock stays, as it cannot be set on a real machine either.
            made |= {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        return made

    async def _spawn(self, slot: int) -> None:
        # Only workers on the same host can prove that a process has ended.
        named = ("unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh")
        with (self.home / f"{self.name}-{slot}.log").open("ab") as log:
            self._slots[slot] = await asyncio.create_subprocess_exec(
                *(named if os.geteuid() == 0 else ()), *COMMAND,
                cwd=ROOT, env=self._environment(), stdout=log, stderr=log,
            )  # fmt: skip
        if self._stopping:
            self._slots[slot].kill()

    async def _keep(self, slot: int) -> None:
        while True:
            process = self._slots[slot]
            began = time.monotonic()
            code = await process.wait()
            if process.pid not in self._killed:
                self.codes[code] += 1
                self._judge(slot, process.pid, code)
            if self._stopping:
                return
            await self._up.wait()
            await asyncio.sleep(AGAIN_S if time.monotonic() < began + 1 else 0.0)
            await self._spawn(slot)

    def _judge(self, slot: int, pid: int, code: int) -> None:
        """Whether a process may end this way: by a pill, on request, or without a database."""
        fine = {-signal.SIGKILL, 69}
        if pid in self._asked or self._stopping:
            # The signal itself ends one that has not begun; 75: no database to write outcomes to.
            fine |= {0, 75, -signal.SIGTERM}
        if code not in fine:
            self.surprises.append(
                f"worker {pid} ended with {code}: {self.home}/{self.name}-{slot}.log"
            )

    # What can be done to it.

    def pids(self) -> list[int]:
        """Its processes that are there."""
        return [each.pid for each in self._slots.values() if each.returncode is None]

    def kill(self, pid: int) -> None:
        """SIGKILL; it is started again at once, unless the host is down."""
        self._killed.add(pid)
        self.notes.kills.append((pid, time.time()))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def terminate(self, pid: int) -> None:
        """SIGTERM, as in a deployment."""
        self._asked.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    def down(self) -> None:
        """The power goes: no process stays, and none is started until up()."""
        self._up.clear()
        for pid in self.pids():
            self.kill(pid)

    def up(self) -> None:
        """The power is back."""
        self._up.set()

    async def stop_for(self, pid: int, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        began = time.time()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        self.notes.pauses.append((pid, began, time.time()))

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        """For the length of a block others may run its jobs."""
        began, pids = time.time(), self.pids()
        try:
            yield
        finally:
            self.notes.pauses += [(pid, began, time.time()) for pid in {*pids, *self.pids()}]

    def any(self, dice: random.Random) -> int | None:
        """One of its processes; None: none is there."""
        there = self.pids()
        return dice.choice(there) if there else None

    # The end.

    async def stop(self) -> None:
        """SIGTERM for all; how they end is judged."""
        self._stopping = True
        self._up.set()
        for pid in self.pids():
            self.terminate(pid)
        async with asyncio.timeout(STOP_S):
            await asyncio.gather(*self._keepers)

    async def close(self) -> None:
        """End all processes, in any case."""
        self._stopping = True
        self._up.set()
        for process in self._slots.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await self.proxy.close()
        _sweep()


def _sweep() -> None:
    """Remove what libfaketime leaves in shared memory of processes that were killed."""
    for path in Path("/dev/shm").glob("*faketime_s*_*"):
        if not Path(f"/proc/{path.name.rpartition('_')[2]}").exists():
            path.unlink(missing_ok=True)
