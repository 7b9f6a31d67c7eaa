"""Run one allowed command to its end, with limits on its output."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

KEEPER = str(Path(__file__).with_name("subprocess_guard.py"))
CHUNK_BYTES = 65536
# How long the guard can take to kill remaining processes after the grace period.
SLACK_S = 3.0


class Ended(NamedTuple):
    """The end of a command.

    Attributes:
        code: the exit code; a negative number is the signal that ended the command.
        out: the beginning of the command's stdout.
        out_bytes: the whole size of the command's stdout.
        err: the end of the command's stderr.
    """

    code: int
    out: bytes
    out_bytes: int
    err: bytes


async def run(
    argv: Sequence[str],
    *,
    stdin: bytes,
    env: Mapping[str, str],
    cwd: str | None,
    grace_s: float,
    out_bytes_max: int,
    err_bytes_max: int,
) -> Ended:
    """Run a command under a guard process of its own. A cancellation also ends the command.

    Raises:
        OSError: the guard could not be started.
    """
    # The kernel closes this pipe when the worker ends, even if it was killed.
    worker_pipe, writing = os.pipe()
    with os.fdopen(writing, "wb") as held:
        # If the start of a process is cancelled, asyncio waits for ever for that process. So a
        # separate task starts the process.
        running = asyncio.create_task(
            _run(argv, worker_pipe, stdin, env, cwd, grace_s, out_bytes_max, err_bytes_max),
            name="command",
        )
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            held.close()  # the guard ends the command
            await asyncio.wait({running}, timeout=grace_s + SLACK_S)
            raise
        finally:
            running.cancel()
        return running.result()


async def _run(
    argv: Sequence[str],
    worker_pipe: int,
    stdin: bytes,
    env: Mapping[str, str],
    cwd: str | None,
    grace_s: float,
    out_bytes_max: int,
    err_bytes_max: int,
) -> Ended:
    """Run the guard to its end. A cancellation kills the guard, and with it the command."""
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            KEEPER,
            str(worker_pipe),
            str(grace_s),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=cwd,
            env=env,
            pass_fds=(worker_pipe,),
            start_new_session=True,
        )
    finally:
        os.close(worker_pipe)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    feeding = asyncio.create_task(_feed(process.stdin, stdin), name="command-stdin")
    out = asyncio.create_task(_head(process.stdout, out_bytes_max), name="command-stdout")
    err = asyncio.create_task(_tail(process.stderr, err_bytes_max), name="command-stderr")
    ending = asyncio.create_task(process.wait(), name="command-end")
    steps = {feeding, out, err, ending}
    try:
        await asyncio.wait(steps)
    finally:
        if process.returncode is None and not all(step.done() for step in steps):
            with suppress(ProcessLookupError):
                process.kill()  # the kernel then kills the command, too
        for step in steps:
            step.cancel()
    return Ended(ending.result(), *out.result(), err.result())


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write the stdin of the command."""
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
    with suppress(BrokenPipeError, ConnectionResetError):
        stream.close()
        await stream.wait_closed()


async def _head(stream: asyncio.StreamReader, bytes_max: int) -> tuple[bytes, int]:
    """Return the first bytes and the size of a stream; the other bytes are read and dropped."""
    kept, total = bytearray(), 0
    while chunk := await stream.read(CHUNK_BYTES):
        total += len(chunk)
        kept += chunk[: bytes_max - len(kept)]
    return bytes(kept), total


async def _tail(stream: asyncio.StreamReader, bytes_max: int) -> bytes:
    """Return the last bytes of a stream."""
    kept = bytearray()
    while chunk := await stream.read(CHUNK_BYTES):
        kept += chunk
        del kept[:-bytes_max]
    return bytes(kept)
