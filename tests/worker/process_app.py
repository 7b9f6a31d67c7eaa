"""Handlers that run in processes of their own, for test_process.py; found there by their names."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from taskd import Cancel, Fail, Fixed, ProcessContext, task
from taskd.core.tasks.registry import Registry
from taskd.handlers import MustEnd, ProcessDied
from taskd.workflows import Next, Stop

REGISTRY = Registry()
NOW = Fixed(0.01)


@task(process=True, registry=REGISTRY)
def adds(a: int, b: int = 2) -> dict[str, int]:
    return {"sum": a + b, "pid": os.getpid()}


@task(process=True, registry=REGISTRY, timeout_s=60, max_attempts=7)
def tells(text: str, ctx: ProcessContext, done: str = "") -> dict[str, Any]:
    ctx.progress(0)
    for n in range(100_000):
        ctx.progress(n, 200_000, text)
    while done and not Path(done).exists():
        time.sleep(0.01)
    names = ("job_id", "task", "queue", "attempt", "max_attempts", "fence", "idempotency_key")
    left = ctx.remaining_s()
    assert left is not None
    return {name: getattr(ctx, name) for name in names} | {"left_s": left}


@task(process=True, registry=REGISTRY)
def cleans_up_badly(began: str) -> None:
    try:
        Path(began).touch()
        time.sleep(60)
    finally:
        raise OSError("the disk is full")


@task(process=True, registry=REGISTRY, metadata={"team": "ops"})
def tells_origin(ctx: ProcessContext) -> list[Any]:
    return [dict(ctx.metadata), ctx.schedule, ctx.tick, ctx.crashes]


@task(process=True, registry=REGISTRY, max_attempts=1)
def reads_resources(ctx: Any) -> None:
    ctx.resources["pool"]


@task(process=True, registry=REGISTRY, max_attempts=1)
def takes_memory(mb: int) -> int:
    return len(bytearray(mb * 1024 * 1024))


@task(process=True, registry=REGISTRY, max_attempts=2, backoff=NOW, on_error={KeyError: Fail})
def raises(what: str) -> Any:
    if what == "verdict":
        raise Cancel("no longer wanted")
    if what == "returned":
        return Cancel("returned")
    if what == "exit":
        raise SystemExit(3)
    if what == "rule":
        raise KeyError("hopeless")
    raise ValueError(f"it was {what}")


@task(process=True, registry=REGISTRY, max_attempts=1)
def dies(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "exit":
        os._exit(7)
    elif how == "oom":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "fork":
        # A child that was forked keeps the line to the worker open.
        if not os.fork():
            time.sleep(60)
        os._exit(8)
    else:
        os.closerange(3, 100)
        if how == "stays":
            time.sleep(60)


@task(process=True, registry=REGISTRY, on_error={ProcessDied: Fail})
def dies_for_good() -> None:
    os._exit(9)


@task(process=True, registry=REGISTRY, max_attempts=1)
def sleeps(s: float, note: str) -> str:
    Path(note).write_text(str(os.getpid()))
    try:
        time.sleep(s)
    except MustEnd as end:
        Path(note).write_text(end.why)
        raise
    return "slept"


@task(process=True, registry=REGISTRY, max_attempts=1)
def blocks_signals(note: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    # What it has started goes with it.
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    Path(note).write_text(f"{os.getpid()} {child.pid}")
    while True:
        time.sleep(60)


def _pauses(line: Any) -> None:
    line.send("here")
    signal.pause()


@task(process=True, registry=REGISTRY, max_attempts=1)
def ends_what_it_forks() -> int | None:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_pauses, args=(theirs,))
    child.start()
    ours.recv()
    child.terminate()
    child.join()
    return child.exitcode


@task(process=True, registry=REGISTRY, max_attempts=1)
def waits_for_note(note: str) -> str:
    Path(note + ".begun").touch()
    while not Path(note).exists():
        time.sleep(0.01)
    return "found"


@task(process=True, registry=REGISTRY, max_attempts=1)
def steps(to: str, n: int) -> Any:
    return Next(to, n=n) if to == "last" else Stop({"stopped": n})


@task(process=True, registry=REGISTRY, max_attempts=1)
def last(n: int) -> int:
    return n


@task(process=True, registry=REGISTRY, keep_logs="all", redact=["token"])
def logs_a_lot(token: str) -> None:
    log = logging.getLogger("shop")
    log.warning("token %s", token)
    for n in range(1000):
        log.warning("line %d", n)
    thread = threading.Thread(target=log.warning, args=("in a thread",))
    thread.start()
    thread.join()


async def _never_runs() -> None: ...


@task(process=True, registry=REGISTRY, max_attempts=1)
def returns_coroutine() -> Any:
    return _never_runs()


@task(process=True, registry=REGISTRY)
def returns_no_json() -> Any:
    return 1j
