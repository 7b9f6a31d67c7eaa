"""Processes of handlers end with their worker, also when that is killed."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes import lives
from tests.system.shell import WITHIN_S, Shell

APP = """
import ctypes, os, signal
from pathlib import Path
from taskd import task

@task(process=True)
def waits(note: str, deaf: bool) -> None:
    if deaf:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    Path(note).write_text(str(os.getpid()))
    if deaf:
        ctypes.pythonapi.pause()  # and keeps the interpreter's lock for ever
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("deaf", [False, True], ids=["waits", "keeps the lock"])
async def test_the_kill_of_a_worker_leaves_no_process(
    tmp_path: Path, dsn: str, sql: Any, deaf: bool
) -> None:
    shell = Shell(tmp_path, dsn, sql)
    (tmp_path / "stop_app.py").write_text(APP)
    try:
        worker = await shell.run(process_slots=2)
        notes = [tmp_path / "one", tmp_path / "two"]
        for note in notes:
            await shell.enqueue("waits", note=str(note), deaf=deaf)
        async with asyncio.timeout(WITHIN_S):
            while not all(note.exists() and note.read_text() for note in notes):
                await asyncio.sleep(0.01)
            pids = [int(note.read_text()) for note in notes]
            assert all(map(lives, pids))
            worker.send_signal(signal.SIGKILL)
            while any(map(lives, pids)):
                await asyncio.sleep(0.01)
    finally:
        await shell.close()
