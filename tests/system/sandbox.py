"""A worker under the restrictions of systemd/taskd.service, without systemd as process 1.

    python -m tests.system.sandbox

Reads the unit itself and applies its restrictions with the kernel's own means: system calls by
libseccomp, from the groups of `systemd-analyze syscall-filter`, and as root a file system, a user
and capabilities of the worker's own. A real `taskd run` then works there against a real PostgreSQL,
under uvloop: coroutines, threads, child processes, name resolution, a mail; it tries what is
forbidden, and drains. One line is printed for every setting of the unit and for every attempt. A
setting that this program does not know is an error, because the trial would not cover it.

Only systemd as process 1 can show: DynamicUser (a user for the life of the service; here a fixed
number), LoadCredential (here the file is copied to systemd's place), the watchdog's restart and
every other reaction to the worker's end (here the worker's messages on its notify socket are read),
the control group (OOMPolicy, DevicePolicy, KillMode), and clean-up (RemoveIPC).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import errno
import json
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg

from tests.system import box, confine
from tests.system.box import Container, by_tcp
from tests.system.container import database
from tests.system.dockerfile import CHECKOUT
from tests.system.sandbox_root import UID, Sandbox
from tests.system.unit import Unit
from tests.tasks.smtp_server import Server, serving

UNIT = CHECKOUT / "systemd" / "taskd.service"
WITHIN_S = 30.0
# The errors of a refusal; which one depends on the part that refuses first.
REFUSALS = {errno.EPERM, errno.EACCES, errno.EROFS, errno.EAFNOSUPPORT, errno.ENOSYS}


def lacks() -> str:
    """What this machine lacks for the trial as a whole; empty if nothing."""
    if shutil.which("systemd-analyze") is None:
        return "systemd-analyze is not installed"
    if "Seccomp:" not in Path("/proc/self/status").read_text():
        return "this kernel has no seccomp"
    try:
        ctypes.CDLL(confine.LIBSECCOMP)
    except OSError:
        return f"{confine.LIBSECCOMP} is not installed"
    return ""


@contextmanager
def notified(place: Path) -> Iterator[list[str]]:
    """The socket on which a worker talks to systemd, and its messages so far."""
    said: list[str] = []
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    loop = asyncio.get_running_loop()
    with receiver:
        receiver.bind(str(place / "notify"))
        (place / "notify").chmod(0o777)
        receiver.setblocking(False)
        loop.add_reader(receiver, lambda: said.extend(receiver.recv(65536).decode().splitlines()))
        try:
            yield said
        finally:
            loop.remove_reader(receiver)


async def tried(sandbox: Sandbox) -> dict[str, list[int]]:
    """What the tries are answered in a sandbox, without a worker."""
    code = "import json, sandbox_app; print(json.dumps(sandbox_app.answers()))"
    container = await sandbox.start([sys.executable, "-c", code], {})
    try:
        ended = await container.ended()
    finally:
        await container.kill()
    assert ended.code == 0, ended
    answers: dict[str, list[int]] = json.loads(ended.out)
    return answers


async def check(sandbox: Sandbox, dsn: str, *, processes: int = 1) -> dict[str, str]:
    """Let a worker work, try forbidden calls, and drain in the sandbox.

    Returns:
        The observations, as text.

    Raises:
        AssertionError: something does not work, or a forbidden call works.
    """
    sql = await asyncpg.connect(dsn)
    try:
        async with by_tcp(dsn) as (front, _), serving() as mails:
            sandbox.credential("dsn", front)
            with notified(sandbox.place) as said:
                argv = [sys.executable, "-m", "taskd", *sandbox.unit.arguments]
                container = await sandbox.start(argv, _settings(mails, processes))
                try:
                    await _ready(container, said)
                    seen = await _life(sandbox, sql, mails)
                    seen |= await _stop(container, sql, said)
                finally:
                    await container.kill()
    finally:
        await sql.close()
    return seen


def _settings(mails: Server, processes: int) -> dict[str, str]:
    given = {
        "app": "sandbox_app", "processes": processes, "log_format": "json",
        "smtp_host": "localhost", "smtp_port": mails.port, "smtp_tls": "off",
        "smtp_sender": "shop@example.org",
    }  # fmt: skip
    return {f"TASKD_{name.upper()}": str(value) for name, value in given.items()}


async def _ready(container: Container, said: list[str]) -> None:
    wanted = {"READY=1", "WATCHDOG=1"}
    with suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            while not wanted <= set(said) and container.process.returncode is None:
                await asyncio.sleep(0.02)
    if container.process.returncode is not None:
        raise AssertionError(await container.ended())
    assert wanted <= set(said), container.lines


async def _life(sandbox: Sandbox, sql: Any, mails: Server) -> dict[str, str]:
    looks = await _result(sql, "looks")
    _check_looks(sandbox, looks)
    answers = await _result(sql, "tries")
    _check_answers(sandbox, answers)
    started = [await _enqueue(sql, "sleeps", s=0.1) for _ in range(20)]
    started += [await _enqueue(sql, "in_a_thread", s=0.1) for _ in range(8)]
    assert [await _ended(sql, each) for each in started] == [None] * 20 + [True] * 8
    assert await _result(sql, "child_processes") == ["loop", "thread"]
    assert await _result(sql, "resolves", name="localhost") == [True, True]
    await _result(sql, "send_email", to="ada@example.org", subject="Hello", body="It works.")
    [(recipients, mail)] = mails.mails
    assert (recipients, mail["Subject"]) == (["ada@example.org"], "Hello")
    refused = (f"{name} {_names(numbers)}" for name, numbers in answers.items() if any(numbers))
    return {
        "loop": looks["loop"],
        "jobs": "20 coroutines, 8 threads, child processes, name resolution, a mail",
        "refused": "; ".join(refused),
    }


def _names(numbers: Sequence[int]) -> str:
    return "/".join(errno.errorcode.get(number, str(number)) for number in numbers)


def _check_looks(sandbox: Sandbox, looks: dict[str, Any]) -> None:
    assert looks["loop"] == "uvloop", looks
    assert looks["Seccomp"] == 2, "no filter of seccomp is on"
    assert {looks[name] for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}, looks
    if "CapabilityBoundingSet" in sandbox.applied:
        assert looks["CapBnd"] == 0, looks
    if "NoNewPrivileges" in sandbox.applied:
        assert looks["NoNewPrivs"] == 1, looks
    if "MemoryDenyWriteExecute, by prctl" in sandbox.applied:
        assert looks["mdwe"] == 1, looks
    if "UMask" in sandbox.applied:
        assert looks["umask"] == sandbox.unit.last("UMask"), looks
    if "PrivateUsers" in sandbox.applied:
        assert looks["uid_map"] == [str(looks["uid"]), str(looks["uid"]), "1"], looks
    if sandbox.own_root:
        assert looks["uid"] == UID, looks
        assert not looks["sees process 1"], "the processes of others can be seen"
        assert looks["devices"] == ["full", "null", "random", "urandom", "zero"]
        # A checkout or an environment in /tmp is mounted there.
        places = [CHECKOUT, Path(sys.prefix), Path(sys.base_prefix)]
        mounted = {each.parts[2] for each in places if each.is_relative_to("/tmp/")}
        assert set(looks["tmp"]) <= mounted, "/tmp is not its own"


def _check_answers(sandbox: Sandbox, answers: dict[str, list[int]]) -> None:
    for setting, numbers in answers.items():
        if setting in sandbox.applied:
            assert set(numbers) <= REFUSALS, f"{setting} does not hold: {_names(numbers)}"


async def _stop(container: Container, sql: Any, said: list[str]) -> dict[str, str]:
    last = await _enqueue(sql, "sleeps", s=0.5)
    # A job that was claimed and has not started is released.
    await container.wait_for("sleeps 0.5")
    container.process.send_signal(signal.SIGTERM)
    ended = await container.ended()
    assert ended.code == 0, ended
    await _ended(sql, last)
    assert await sql.fetchval("SELECT bool_and(died_at IS NOT NULL) FROM taskd.worker")
    assert not await sql.fetchval("SELECT count(*) FROM taskd.job"), "a drained worker leaves none"
    assert "STOPPING=1" in said, said
    return {"told systemd": "READY=1, WATCHDOG=1, STOPPING=1", "SIGTERM": "drained, exit code 0"}


async def _result(sql: Any, task: str, **args: Any) -> Any:
    return await _ended(sql, await _enqueue(sql, task, **args))


async def _enqueue(sql: Any, task: str, **args: Any) -> int:
    return int(await sql.fetchval("SELECT taskd.enqueue($1, $2)", task, json.dumps(args)))


async def _ended(sql: Any, job_id: int) -> Any:
    """Wait until a job is done; its result."""
    question = "SELECT state::text, result::text, errors::text FROM taskd.job_history WHERE id = $1"
    async with asyncio.timeout(WITHIN_S):
        while (row := await sql.fetchrow(question, job_id)) is None:
            await asyncio.sleep(0.02)
    assert row["state"] == "done", row
    return json.loads(row["result"] or "null")


def main() -> None:
    """The trial, with one line for everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--unit", type=Path, default=UNIT, help="another unit to be tried")
    options = parser.parse_args()
    if why := lacks():
        raise SystemExit(f"not applicable here: {why}")
    without = box.lacks()
    with tempfile.TemporaryDirectory(prefix="taskd-sandbox-") as place, database() as dsn:
        sandbox = Sandbox(Unit(options.unit.read_text()), Path(place), own_root=not without)
        try:
            seen = asyncio.run(check(sandbox, dsn))
        finally:
            for name, note in sandbox.applied.items():
                print(f"applied         {name}: {note}")
            for name, note in sandbox.left.items():
                print(f"not applicable  {name}: {note}")
    for name, note in seen.items():
        print(f"seen            {name}: {note}")


if __name__ == "__main__":
    main()
