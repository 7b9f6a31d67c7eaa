"""Several worker processes under one parent: `taskd run --processes 4`.

The parent runs no job. It starts its children, replaces crashed ones, forwards signals to them, and
listens for all of them (claiming/shared_listening.py). The children send their states to the parent
by the protocol of sd_notify, and the parent reports the sum to systemd (sd_notify.py). Each child
has a session of its own. Otherwise, a child would receive each Ctrl-C twice: from the terminal and
from the parent.

The first child starts alone. The other children start when the first child is ready. So an error in
the settings or the app is logged only once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from taskd import events
from taskd.config import Settings
from taskd.errors import ConfigError, TaskdError
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from taskd.worker.claiming.listener import listening_database
from taskd.worker.claiming.shared_listening import SharedListening
from taskd.worker.finishing.drain_report import DrainReport
from taskd.worker.health import BLOCKED_S, Condition
from taskd.worker.processes.stats_socket import StatsClient
from taskd.worker.sd_notify import STATUS_EVERY_S, Notify, NotifySocket, Status
from taskd.worker.services.service import Service
from taskd.worker.services.supervisor import Supervisor
from taskd.worker.status import WorkerStatus
from taskd.worker.stopping.parent_watch import EXIT_ABANDONED, ProcessIndex, longest_stop_s

# The delay before a crashed child is replaced. The delay doubles with each crash, and is reset if
# the child has lived for STEADY_S.
DELAY_S = 1.0
DELAY_S_MAX = 30.0
STEADY_S = 60.0

# How long the parent's own services can take to stop.
BESIDE_S = 2.0

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
FORWARDED = (*STOPPING, signal.SIGHUP, signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR2)

# A restart does not fix these errors: a wrong command line (2), a refused login or statement (77),
# wrong settings or schema (78).
HOPELESS = (2, 77, 78)
# Of the exit codes of its children, the parent exits with the one that comes last in this list. A
# code that is not in the list counts as 1.
WORST_LAST = (0, 1, 69, EXIT_ABANDONED, *HOPELESS)


def _badness(code: int) -> int:
    return WORST_LAST.index(code if code in WORST_LAST else 1)


class Child:
    """A worker process, and its reports.

    Attributes:
        received: whether the parent has received a message of the child. The child sends its first
            message after it has installed its signal handlers.
        ready: whether the child claims jobs, and is not reading its settings again.
        begun: whether the child was ready once.
        ticked: whether the child has sent WATCHDOG since the parent last sent WATCHDOG; None until
            the child has sent its first WATCHDOG.
        report: the drain report of the child; None until the parent has received it. A child that
            has sent a report has not crashed.
        stats_client: requests the counters of the child; None if the parent serves no HTTP.
    """

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, stats_client: StatsClient | None
    ) -> None:
        self.number = number
        self.process = process
        self.stats_client = stats_client
        self._heard_at = time.monotonic()
        self.received = self.ready = self.begun = False
        self.ticked: bool | None = None
        self.status = Status()
        self.report: DrainReport | None = None
        self._began = time.monotonic()
        self._owed: list[signal.Signals] = []

    def receive(self, fields: dict[str, str]) -> None:
        """Handle the variables of a message from the child."""
        self._heard_at = time.monotonic()
        if not self.received:
            self.received = True
            for number in self._owed:
                self.signal(number)
        if "READY" in fields:
            self.ready = self.begun = True
        if "WATCHDOG" in fields:
            self.ticked = True
        if "X_TASKD_STATUS" in fields:
            self.status = Status(**json.loads(fields["X_TASKD_STATUS"]))
        if "X_TASKD_REPORT" in fields:
            self.report = DrainReport(**json.loads(fields["X_TASKD_REPORT"]))

    def signal(self, number: signal.Signals) -> None:
        """Forward a signal to the child.

        If the child has no signal handlers yet, a stop signal ends the child immediately, and any
        other signal is sent later.
        """
        if not self.received and number not in STOPPING:
            self._owed.append(number)
            return
        if not self.received:
            number = signal.SIGTERM  # the child has claimed nothing, so it need not drain
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def condition(self) -> Condition:
        """Return the condition of the child.

        A child that was ready sends WATCHDOG regularly, so silence means that its event loop is
        blocked.
        """
        me = f"process {self.number} (pid {self.process.pid}): "
        silent_s = time.monotonic() - self._heard_at
        stuck = self.status.stuck
        if self.begun and silent_s > BLOCKED_S:
            stuck = f"its event loop has not run for {silent_s:.0f} s"
        unready = stuck or (self.status.unready if self.begun else "the worker is starting")
        return Condition(me + stuck if stuck else "", me + unready if unready else "")

    @property
    def age_s(self) -> float:
        """Return the seconds since the start of the child."""
        return time.monotonic() - self._began


class Processes:
    """The parent.

    Args:
        settings: the settings of the parent; `processes` is the number of children.
        command: the command line of a child. The parent adds variables to its environment.
        notify: sends messages to the supervisor of the parent.
        reload: called on SIGHUP; reads the settings again and returns them, or raises ConfigError.

    Attributes:
        report: the sum of the drain reports of the children; complete when run() has returned.
        beside: services of the parent, which start before the first child, and stop after the last
            child has ended.
    """

    def __init__(
        self,
        settings: Settings,
        command: Sequence[str],
        *,
        notify: Notify,
        reload: Callable[[], Settings],
    ) -> None:
        self.report = DrainReport()
        self._settings = settings
        self._command = list(command)
        self._notify = notify
        self._reload = reload
        self._children: dict[int, Child] = {}
        self._codes = {0}
        self._begun = self._reported_ready = self._was_ready = self._quiet = False
        self._go_ahead = asyncio.Event()
        self._stop_requested = asyncio.Event()
        self.beside: list[Service] = []
        self._stats = settings.http != "off"

    def condition(self) -> Condition:
        """Return the condition for probes, with the texts of the first children that have one."""
        conditions = [child.condition() for child in self._children.values()]
        stuck = next((each.stuck for each in conditions if each.stuck), "")
        if self._stop_requested.is_set():
            return Condition(stuck, "the worker is stopping")
        missing = sorted(
            {*range(1, self._settings.processes + 1)}
            - {child.number for child in self._children.values()}
        )
        unready = next((each.unready for each in conditions if each.unready), "")
        if not unready and missing:
            unready = f"process {missing[0]} is not running"
        return Condition(stuck, unready)

    async def statuses(self) -> list[WorkerStatus]:
        """Return the statuses of the children; children that do not answer are left out."""
        clients = [
            child.stats_client
            for child in self._children.values()
            if child.stats_client is not None
        ]
        answers = await asyncio.gather(*(each.ask() for each in clients))
        found = [answer for answer in answers if answer is not None]
        return sorted(found, key=lambda each: each.process)

    async def run(self, database: Database) -> int:
        """Run the children until all of them have ended; return the exit code.

        Raises:
            TaskdError: PostgreSQL is unavailable at the start, or its schema does not fit.
        """
        beside = Supervisor([self.beside])
        beside.start()
        try:
            return await self._run(database)
        finally:
            if self.beside:
                await beside.stop_tier(BESIDE_S)
                if left := beside.kill():
                    await asyncio.wait(left, timeout=1.0)

    async def _run(self, database: Database) -> int:
        await migrations.check(database)
        listening = listening_database(self._settings, database)
        self._listening = SharedListening(listening, self._settings.listen_connections)
        loop = asyncio.get_running_loop()
        self._parent_pipe, held = os.pipe()
        self._inbox = NotifySocket()
        loop.add_reader(self._inbox.socket, self._listen)
        for each in FORWARDED:
            loop.add_signal_handler(each, self._signalled, each)
        ticking = asyncio.create_task(self._tick_for_ever(), name="notifier")
        self._notify.starting()
        try:
            async with asyncio.TaskGroup() as children:
                for number in range(1, self._settings.processes + 1):
                    children.create_task(self._keep(number, database), name=f"process:{number}")
        finally:
            await self._bring_down()
            ticking.cancel()
            await self._listening.close()
            for each in FORWARDED:
                loop.remove_signal_handler(each)
            loop.remove_reader(self._inbox.socket)
            self._inbox.close()
            os.close(held)
            os.close(self._parent_pipe)
        if self._begun:
            events.worker_stopped(processes=self._settings.processes, **self.report.log_fields())
        return max(self._codes, key=_badness)

    # The children.

    async def _keep(self, number: int, database: Database) -> None:
        """Run the child with this number, and replace it when it has crashed."""
        delay_s = DELAY_S
        if number > 1:
            await self._go_ahead.wait()
        while not self._stop_requested.is_set():
            try:
                child = await self._spawn(number)
            except OSError as error:
                # There is no memory or no interpreter, or there are too many processes. A later
                # start may succeed, and the other children need not end.
                events.worker_not_started(number, error, delay_s)
                if not self._begun:
                    self._codes.add(1)
                    self._stop("no process could be started")
                    return
            else:
                code = await child.process.wait()
                self._listen()  # read the last messages of the child
                del self._children[child.process.pid]
                self._listening.detach(child.process.pid)
                if child.stats_client is not None:
                    child.stats_client.close()
                # A crashed child sends no report. Count the attempts of its last status instead.
                self.report.add(child.report or DrainReport(jobs=child.status.jobs))
                if child.age_s >= STEADY_S:
                    delay_s = DELAY_S
                database_fails = await self._database_fails(child, code, database)
                if self._is_over(child, code, delay_s, database_fails=database_fails):
                    return
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stop_requested.wait()
            delay_s = min(delay_s * 2, DELAY_S_MAX)

    async def _database_fails(self, child: Child, code: int, database: Database) -> bool:
        """Return whether the child is a replacement that did not start because PostgreSQL fails."""
        if child.begun or not self._begun or code not in HOPELESS:
            return False
        try:
            await migrations.check(database)
        except TaskdError:
            return True
        return False

    async def _bring_down(self) -> None:
        """Drain the children that still run. Only an error in this module leaves such children."""
        self._forward(signal.SIGTERM)
        ends = [asyncio.create_task(c.process.wait(), name="end") for c in self._children.values()]
        if ends:
            await asyncio.wait(ends, timeout=longest_stop_s(self._settings))

    async def _spawn(self, number: int) -> Child:
        with ExitStack() as undo:
            stats_client = StatsClient() if self._stats else None
            if stats_client is not None:
                undo.callback(stats_client.close)
            ours, listens = self._listening.pair()
            undo.callback(ours.close)
            with listens:
                stats = -1 if stats_client is None else stats_client.theirs
                process = await self._start(number, stats, listens.fileno())
            undo.pop_all()
        self._listening.attach(process.pid, ours)
        if stats_client is not None:
            stats_client.close_theirs()
        child = self._children[process.pid] = Child(number, process, stats_client)
        if self._quiet:
            child.signal(signal.SIGTSTP)
        if self._stop_requested.is_set():
            child.signal(signal.SIGTERM)
        return child

    async def _start(self, number: int, stats: int, listens: int) -> asyncio.subprocess.Process:
        """Start the process of a child.

        Args:
            stats: the file descriptor over which the child answers requests; -1 if there is none.
            listens: the file descriptor over which the child receives notifications.
        """
        index = ProcessIndex(number, self._settings.processes, self._parent_pipe, stats, listens)
        environment = os.environ | {"NOTIFY_SOCKET": self._inbox.address} | index.environment()
        # The parent's HTTP probes must know whether the event loop of the child runs, even if the
        # supervisor expects no watchdog messages.
        watchdog_s = self._notify.watchdog_s or (STATUS_EVERY_S * 4 if self._stats else None)
        if watchdog_s is not None:
            environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        inherited = (self._parent_pipe, listens, *([] if stats < 0 else [stats]))
        return await asyncio.create_subprocess_exec(
            *self._command, env=environment, pass_fds=inherited, start_new_session=True
        )

    def _is_over(self, child: Child, code: int, delay_s: float, *, database_fails: bool) -> bool:
        """Return whether an ended child is not replaced; if so, record its exit code."""
        report, pid = child.report, child.process.pid
        if self._stop_requested.is_set():
            if report is None and child.begun:
                # The child crashed or was killed during the stop, so its attempts are abandoned.
                self._codes.add(EXIT_ABANDONED)
                events.worker_crashed(child.number, pid, code, 0.0)
            elif report is not None:
                self._codes.add(report.exit_code)
        elif report is not None and report.left is not None:
            self._codes.add(report.exit_code)  # --until-empty
        elif report is not None and report.outgrown:
            self._codes.add(report.exit_code)
            self._stop(report.why)  # the other children stop for the same reason
        elif not child.begun and not database_fails and (code in HOPELESS or not self._begun):
            # The parent exits with the same code as this child, which has logged the reason unless
            # a signal killed it.
            if code < 0:
                events.worker_crashed(child.number, pid, code, 0.0)
            self._codes.add(max(code, 1))
            self._stop(f"exit code {code}")
            self._forward(signal.SIGTERM)
        else:
            events.worker_crashed(child.number, pid, code, delay_s)
            return False
        return True

    # Messages of children and signals.

    def _listen(self) -> None:
        for pid, fields in self._inbox.received():
            child = self._children.get(pid)
            if child is not None:
                child.receive(fields)
        living = self._children.values()
        if any(child.begun for child in living):
            self._begun = True
            self._go_ahead.set()
        # After a reload, only the living children must be ready: a crashed child would delay the
        # report.
        ready = sum(child.ready for child in living)
        needed = len(living) if self._was_ready else self._settings.processes
        if not self._reported_ready and ready >= needed:
            self._reported_ready = self._was_ready = True
            self._notify.ready()

    async def _tick_for_ever(self) -> None:
        while True:
            children = self._children.values()
            ticking = all(child.ticked is not False for child in children)
            if ticking:
                for child in children:
                    child.ticked = None if child.ticked is None else False
            parts = [child.status for child in children]
            status = Status.total([*parts, Status(jobs=self.report.jobs)])
            self._notify.tick(status, ticking=ticking, draining=self._stop_requested.is_set())
            await asyncio.sleep(self._notify.every_s)

    def _signalled(self, number: signal.Signals) -> None:
        if number in STOPPING:
            self._stop(number.name)
        elif number == signal.SIGHUP:
            self._reload_settings()
        elif number != signal.SIGUSR2:
            self._quiet = number == signal.SIGTSTP
        self._forward(number)

    def _forward(self, number: signal.Signals) -> None:
        for child in self._children.values():
            child.signal(number)

    def _reload_settings(self) -> None:
        with suppress(ConfigError):  # the children log the error
            self._settings = self._reload()
        if self._reported_ready:
            self._reported_ready = False
            self._notify.reloading()
            for child in self._children.values():
                child.ready = False

    def _stop(self, why: str) -> None:
        """Start no further child, and kill the children that do not end in time."""
        if not self._stop_requested.is_set():
            self.report.why = why
            self._stop_requested.set()
            self._go_ahead.set()
            self._notify.stopping()
            longest_s = longest_stop_s(self._settings)
            asyncio.get_running_loop().call_later(longest_s, self._kill)

    def _kill(self) -> None:
        for child in self._children.values():
            with suppress(ProcessLookupError):
                child.process.kill()
