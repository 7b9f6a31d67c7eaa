"""run_command with real processes: what they are given, what their end means, and that they end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from taskd import tasks
from taskd.config import Settings, load
from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
from taskd.core.outcomes.results import Unstored
from taskd.errors import ConfigError, InvalidArgs
from taskd.tasks import run_command
from taskd.tasks.run_command import CommandFailed, CommandNotAllowed
from tests.processes import lives

PYTHON = [sys.executable, "-I", "-S", "-c"]
SH = ["/bin/sh", "-c"]


@dataclass
class Attempt:
    job_id: int = 7
    idempotency_key: str = "db-7"
    attempt: int = 2
    max_attempts: int = 20


async def run(command: dict[str, Any], payload: dict[str, Any] | None = None) -> Any:
    [task] = tasks.built_in(Settings(commands={"it": command}))
    return await task.handler(Attempt(), "it", payload)


def sh(script: str, **more: Any) -> dict[str, Any]:
    return {"argv": [*SH, script]} | more


async def until(true: Callable[[], Any], within_s: float = 15.0) -> Any:
    ends = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)
    return found


def pids(file: Path, count: int) -> list[int]:
    """The pids that a command has written, once they are all there."""
    words = file.read_text().split() if file.exists() else []
    return [int(word) for word in words] if len(words) == count else []


# What goes in and comes out.


async def test_the_payload_is_stdin_and_json_on_stdout_is_the_result() -> None:
    script = "import sys, json; got = json.load(sys.stdin); print(json.dumps({'got': got}))"
    assert await run({"argv": [*PYTHON, script]}, {"n": 1, "o": "é"}) == {"got": {"n": 1, "o": "é"}}


@pytest.mark.parametrize(("out", "result"), [("", None), ("hello", None), ("3", 3), ("[1]", [1])])
async def test_what_is_no_json_is_no_result(out: str, result: Any) -> None:
    assert await run(sh(f"printf %s '{out}'")) == result


async def test_it_gets_few_variables_and_none_of_the_workers_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TASKD_DSN", "postgresql://secret@db/x")
    monkeypatch.setenv("PROXY", "here")
    script = "import os, json; print(json.dumps([dict(os.environ), os.getcwd()]))"
    command = {
        "argv": [*PYTHON, script], "cwd": str(tmp_path), "env": {"MODE": "fast"},
        "pass_env": ["PROXY", "MISSING"],
    }  # fmt: skip
    environ, cwd = await run(command)
    assert cwd == str(tmp_path)
    assert environ == {
        "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "MODE": "fast", "PROXY": "here",
        "TASKD_JOB_ID": "7", "TASKD_ATTEMPT": "2", "TASKD_MAX_ATTEMPTS": "20",
        "TASKD_IDEMPOTENCY_KEY": "db-7",
    } | {name: environ[name] for name in environ if name == "LC_CTYPE"}  # fmt: skip


async def test_no_shell_reads_what_a_job_says(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with pytest.raises(CommandNotAllowed, match="it has it"):
        [task] = tasks.built_in(Settings(commands={"it": sh("true")}))
        await task.handler(Attempt(), f"it; touch {trap}", {})
    await run({"argv": ["cat"]}, {"a": f"$(touch {trap})"})
    assert not trap.exists()


async def test_a_command_that_does_not_read_its_stdin_is_no_error() -> None:
    assert await run(sh("exit 0"), {"big": "x" * 200_000}) is None


# Exit codes.


@pytest.mark.parametrize(
    ("code", "exits", "verdict"),
    [
        (1, {}, CommandFailed),
        (75, {}, Retry),
        (75, {"75": "fail"}, Fail),
        (10, {"10": "retry 30s"}, Retry),
        (11, {"11": "snooze 5m"}, Snooze),
        (12, {"12": "cancel"}, Cancel),
        (13, {"13": "fail"}, Fail),
        (127, {}, CommandFailed),
    ],
)
async def test_an_exit_code_decides(code: int, exits: dict[str, str], verdict: Any) -> None:
    with pytest.raises(verdict) as raised:
        await run(sh(f"echo first >&2; echo why >&2; exit {code}", exits=exits))
    if verdict is Snooze:
        assert raised.value.delay_s == 300.0
        return
    assert str(raised.value) == f"it: exit code {code}: first\nwhy"
    if verdict is Retry:
        assert raised.value.delay_s == (30.0 if exits else None)


async def test_an_exit_code_can_mean_done() -> None:
    assert await run(sh("echo '[]'; exit 3", exits={"3": "done"})) == []


async def test_a_signal_is_a_failure_that_names_it() -> None:
    with pytest.raises(CommandFailed, match="it: signal 11"):
        await run(sh("kill -SEGV $$"))


# Limits.


async def test_gigabytes_on_stdout_and_stderr_do_not_fill_the_memory() -> None:
    script = (
        "import sys; b = b'x' * 1048576\n"
        "for n in range(200): sys.stdout.buffer.write(b); sys.stderr.buffer.write(b)\n"
        "sys.stderr.write('the end')"
    )
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = await run({"argv": [*PYTHON, script]})
    assert isinstance(result, Unstored)
    assert result.why == "stdout has 209,715,200 bytes; the limit is 262,144"
    with pytest.raises(CommandFailed, match=r"the end$") as raised:
        await run({"argv": [*PYTHON, script + "; sys.exit(1)"]})
    assert len(str(raised.value)) < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000  # KiB


# Its end.


async def test_cancelled_it_ends_by_a_sigterm_to_its_whole_group(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    script = f"trap 'echo ended >> {said}.end; exit 0' TERM; sleep 600 & echo $$ $! > {said}; wait"
    running = asyncio.create_task(run(sh(script)))
    shell, child = await until(lambda: pids(said, 2))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert Path(f"{said}.end").read_text() == "ended\n"
    assert not lives(shell)
    assert not lives(child)


@pytest.mark.parametrize("steps", range(8))
async def test_cancelled_while_it_starts_it_ends_with_its_whole_group(
    steps: int, tmp_path: Path
) -> None:
    said = tmp_path / "pids"
    running = asyncio.create_task(run(sh(f"sleep 600 & echo $$ $! > {said}; wait")))
    for _ in range(steps):
        await asyncio.sleep(0)
    # The loop stands still while the command begins, as on a busy machine.
    ends = time.monotonic() + (15.0 if steps > 1 else 0.0)
    while time.monotonic() < ends and not pids(said, 2):
        time.sleep(0.01)
    running.cancel()
    async with asyncio.timeout(15.0):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not any(map(lives, pids(said, 2)))


async def test_one_that_ignores_its_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    said = tmp_path / "pids"
    script = f"trap '' TERM; sh -c 'trap \"\" TERM; sleep 600' & echo $$ $! > {said}; sleep 600"
    running = asyncio.create_task(run(sh(script, grace="0.2s")))
    both = await until(lambda: pids(said, 2))
    began = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert 0.15 < time.monotonic() - began < 3.0
    assert not any(map(lives, both))


async def test_what_a_command_leaves_behind_is_killed_also_in_a_session_of_its_own(
    tmp_path: Path,
) -> None:
    said = tmp_path / "pids"
    script = f"sleep 600 & echo $! >> {said}; setsid sleep 600 & echo $! >> {said}; sleep 0.1"
    assert await run(sh(script)) is None
    left = await until(lambda: pids(said, 2))
    assert not any(map(lives, left))


async def test_no_descriptor_and_no_zombie_stays(tmp_path: Path) -> None:
    await run(sh("true"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        await run(sh("true"))
    running = asyncio.create_task(run(sh("sleep 600")))
    await asyncio.sleep(0.1)
    running.cancel()
    await asyncio.wait({running})
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    children = map(int, Path("/proc/thread-self/children").read_text().split())
    assert all(map(lives, children)), "one is a zombie"


async def worker(dsn: str, home: Path, commands: dict[str, Any]) -> asyncio.subprocess.Process:
    environ = os.environ | {"TASKD_DSN": dsn, "TASKD_COMMANDS": json.dumps(commands)}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", "run", "--log-format", "json", cwd=home, env=environ,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def test_a_worker_that_is_killed_leaves_no_process(dsn: str, home: Path, sql: Any) -> None:
    said = home / "pids"
    slow = sh(f"sleep 600 & setsid sleep 600 & echo $$ $! > {said}; wait", grace="0s")
    await sql.execute(
        """SELECT taskd.enqueue('run_command', '{"command": "slow"}', queue => 'commands')"""
    )
    process = await worker(dsn, home, {"slow": slow})
    both = await until(lambda: pids(said, 2))
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: not any(map(lives, both)))


async def test_a_job_runs_a_command_and_its_timeout_ends_it(dsn: str, home: Path, sql: Any) -> None:
    said = home / "pids"
    commands = {
        "add": {"argv": [*PYTHON, "import json, sys; print(sum(json.load(sys.stdin)['n']))"]},
        "slow": sh(f"echo $$ > {said}; sleep 600"),
    }
    process = await worker(dsn, home, commands)
    await sql.execute(
        """SELECT taskd.enqueue('run_command', '{"command": "add", "payload": {"n": [1, 2]}}',
                                queue => 'commands'),
                  taskd.enqueue('run_command', '{"command": "slow"}', queue => 'commands',
                                timeout_s => 0.5, max_attempts => 1)"""
    )
    rows = "SELECT state::text, result::text, reason FROM taskd.job_history ORDER BY id"
    while len(found := await sql.fetch(rows)) < 2:
        await asyncio.sleep(0.02)
    assert [tuple(row) for row in found] == [
        ("done", "3", None),
        ("failed", None, "TimedOut: the attempt took longer than 0.5 s"),
    ]
    assert not lives(pids(said, 1)[0])
    process.terminate()
    assert await process.wait() == 0


# Settings.


def test_the_settings_turn_it_on(home: Path) -> None:
    (home / "taskd.toml").write_text(
        '[commands.thumbnail]\nargv = ["cat", "-"]\nexits = {4 = "fail"}\ngrace = "5s"\n'
    )
    [task] = tasks.built_in(load(environ={}).settings)
    assert (task.name, task.queue) == ("run_command", "commands")
    task.job(command="thumbnail", payload={"a": [1]})
    with pytest.raises(InvalidArgs):
        task.job(command="thumbnail", payload=[1])
    allowed = run_command.allowed(load(environ={}).settings)["thumbnail"]
    assert (allowed.grace_s, allowed.exits) == (5.0, {"75": "retry", "4": "fail"})
    assert allowed.argv[0].startswith("/")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({"argv": []}, "argv"),
        ({"argv": "cat -"}, "argv"),
        ({"argv": ["no-such-program"]}, "not an executable program"),
        ({"argv": ["cat"], "shell": True}, "shell"),
        ({"argv": ["cat"], "cwd": "/nowhere"}, "not a directory"),
        ({"argv": ["cat"], "exits": {"0": "fail"}}, "1 to 255"),
        ({"argv": ["cat"], "exits": {"3": "explode"}}, "write an exit code"),
        ({"argv": ["cat"], "exits": {"3": "snooze"}}, "have a time"),
        ({"argv": ["cat"], "exits": {"3": "retry soon"}}, "not a duration"),
        ({"argv": ["cat"], "grace": "5h"}, "grace"),
    ],
)
def test_a_command_that_cannot_run_shows_at_the_start(command: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        tasks.built_in(Settings(commands={"it": command}))
    assert "commands: it" in str(raised.value)


def test_the_environment_takes_json_and_nothing_else() -> None:
    found = load(environ={"TASKD_COMMANDS": '{"a": {"argv": ["cat"]}}'}).settings.commands
    assert found == {"a": {"argv": ["cat"]}}
    for wrong in ("cat", "[1]"):
        with pytest.raises(ConfigError, match="TASKD_COMMANDS"):
            load(environ={"TASKD_COMMANDS": wrong})
