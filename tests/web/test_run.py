"""`taskd run --http` as a process, and as several under one parent."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from taskd.cli import cli
from tests.processes import children
from tests.system.shell import ROOT, WITHIN_S
from tests.system.test_processes import Family, family
from tests.web.conftest import samples

__all__ = ["family"]

TERM, KILL = signal.SIGTERM, signal.SIGKILL


class Client:
    """Requests pages of a worker that has logged its address."""

    def __init__(self, family: Family) -> None:
        self._family = family

    async def get(self, path: str) -> tuple[int, str]:
        [line] = await self._family.wait_for("http.listening")
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            answer = await client.get(f"http://{line['address']}{path}")
        return answer.status_code, answer.text.strip()

    async def until(self, path: str, true: Callable[[int, str], bool]) -> tuple[int, str]:
        async with asyncio.timeout(WITHIN_S):
            while True:
                answer = await self.get(path)
                if true(*answer):
                    return answer
                await asyncio.sleep(0.1)


@pytest.fixture
async def client(family: Family) -> AsyncIterator[Client]:
    return Client(family)  # type: ignore[return-value]


async def test_the_parent_answers_for_all_of_its_processes(family: Family, client: Client) -> None:
    parent = await family.start("--http", "0", concurrency=3)
    assert await client.until("/readyz", lambda status, _: status == 200) == (200, "ready")
    assert await client.get("/livez") == (200, "alive")
    await family.enqueue("sleeps", 30, s=0.05)
    await family.settled(30)
    _, text = await client.get("/metrics")
    found = samples(text)
    done = [found[name] for name in found if 'outcome="done"' in name]
    assert (len(done), sum(done)) == (2, 30)
    assert found['taskd_process_ready{process="1"}'] == 1
    assert found['taskd_process_ready{process="2"}'] == 1
    assert found['taskd_workers{state="live"}'] == 2
    # A killed process is replaced: the worker lives on, and is not ready meanwhile.
    os.kill(children(parent.pid)[0], KILL)
    _, why = await client.until("/readyz", lambda status, _: status == 503)
    assert why.startswith("process ")
    assert await client.get("/livez") == (200, "alive")
    await client.until("/readyz", lambda status, _: status == 200)
    assert (await family.stop(parent, TERM))[0] == 0


async def test_a_process_whose_loop_is_blocked_is_named_within_bounded_time(
    family: Family, client: Client
) -> None:
    parent = await family.start("--http", "0", concurrency=1, drain_s=20)
    await client.until("/readyz", lambda status, _: status == 200)
    await family.enqueue("blocks", s=9)
    number = (await family.wait_for("loop.blocked", task="blocks"))[0]["process"]
    me = f"process {number} "
    _, why = await client.until("/livez", lambda status, why: status == 503 and me in why)
    assert re.fullmatch(rf"process {number} \(pid \d+\): its event loop has not run for \d+ s", why)
    # The metrics of the others are there, and a scrape does not wait long for the stopped one.
    _, text = await client.get("/metrics")
    assert {name for name in samples(text) if "process_ready" in name} == {
        f'taskd_process_ready{{process="{3 - number}"}}'
    }
    await client.until("/livez", lambda status, _: status == 200)
    await family.settled(1)
    # They answer during the drain, too.
    await family.enqueue("sleeps", s=2)
    await family.running(1)
    parent.send_signal(TERM)
    await family.wait_for("worker.draining")
    assert await client.get("/readyz") == (503, "the worker is stopping")
    assert await client.get("/livez") == (200, "alive")
    assert await family.end(parent) == 0


async def start_in_vain(dsn: str, *args: str, **environ: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", "run", "--app", "stop_app", *args,
        env={k: v for k, v in os.environ.items() if not k.startswith(("TASKD_", "PG"))}
        | {"TASKD_DSN": dsn, "PYTHONPATH": str(ROOT)} | environ,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(WITHIN_S):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize("processes", ["1", "2"])
async def test_an_address_where_nobody_can_listen_is_exit_78(
    family: Family, dsn: str, processes: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = await start_in_vain(dsn, "--http", port, "--processes", processes)
    assert code == 78
    assert said == (
        f"taskd: cannot serve HTTP at 127.0.0.1:{port}: another process listens there; "
        "stop it, or choose another port\n"
    )


async def test_a_missing_extra_is_exit_78_and_gives_the_pip_line(
    family: Family, dsn: str, tmp_path: Path
) -> None:
    # What `python -m` puts first is the current directory, and its module hides the real one.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'uvicorn' else find(name, *more)\n"
    )
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    code, said = await start_in_vain(dsn, "--http", "0", PYTHONPATH=path)
    assert (code, said) == (78, "taskd: --http needs uvicorn: pip install 'pgtaskd[web]'\n")


def test_nonsense_is_a_wrong_command_line() -> None:
    result = CliRunner().invoke(cli, ["run", "--http", "nine"], prog_name="taskd")
    assert result.exit_code == 2
    assert "'nine' is neither off, a port such as 9090, nor host:port" in result.output


async def test_a_worker_works_on_while_strangers_hold_its_sockets(
    family: Family, client: Client
) -> None:
    parent = await family.start("--http", "0", ready=1, processes=1)
    [line] = await family.wait_for("http.listening")
    host, _, port = line["address"].rpartition(":")
    held: list[Any] = []
    for number in range(300):
        held.append(socket.create_connection((host, int(port))))
        if number % 3:
            held[-1].send(b"GET /metrics HTTP/1.1\r\nhost: x\r\n" * (number % 3))
    await family.enqueue("sleeps", 20, s=0)
    await family.settled(20)
    assert await client.get("/livez") == (200, "alive")
    for each in held:
        each.close()
    assert (await family.stop(parent, TERM))[0] == 0
    assert not family.of("request.failed")
