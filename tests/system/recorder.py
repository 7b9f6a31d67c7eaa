"""What handlers under judgement use to say that they started and how they ended.

A record is kept before the call returns, by a way that is not the worker's, so a killed process
leaves exactly what happened: in the database, or, where the database itself is broken, in a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import asyncpg
import psycopg

APPLICATION_NAME = "judge recorder"
RECORD = "INSERT INTO judge.record (job, attempt, fence, pid, phase) "
COLUMNS = (
    "SELECT * FROM unnest($1::bigint[], $2::integer[], $3::bigint[], $4::integer[], $5::text[])"
)

# For work that commits together with its job: the record is there if and only if the job is done.
DONE = RECORD + "VALUES ($1, $2, $3, $4, 'done')"

Row = tuple[int, int | None, int | None, int, str]


class Recorder:
    """Write to the database: `write` for `async def` handlers, `now` for handlers in threads.

    Records of one turn of the loop are written together: recording costs a busy worker two
    statements
    per batch and not two per job.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._waiting: list[tuple[Row, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._connection: asyncpg.Connection | None = None
        self._thread = threading.local()

    async def write(self, job: int, attempt: int | None, fence: int | None, phase: str) -> None:
        """Record one phase; returns when it is committed."""
        written = asyncio.get_running_loop().create_future()
        self._waiting.append(((job, attempt, fence, os.getpid(), phase), written))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())
        await written

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                connection = await self._connected()
                await connection.execute(
                    RECORD + COLUMNS, *zip(*(row for row, _ in batch), strict=True)
                )
            except Exception as error:  # noqa: BLE001 - its handlers report it
                for _, written in batch:
                    if not written.done():
                        written.set_exception(error)
                continue
            for _, written in batch:
                # A cancelled handler does not wait any more; its record stands.
                if not written.done():
                    written.set_result(None)

    async def _connected(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await asyncpg.connect(
                self._dsn, server_settings={"application_name": APPLICATION_NAME}
            )
        return self._connection

    def now(self, job: int, attempt: int | None, fence: int | None, phase: str) -> None:
        """Record one phase from a thread."""
        connection = getattr(self._thread, "connection", None)
        if connection is None or connection.closed:
            connection = psycopg.connect(
                self._dsn, autocommit=True, application_name=APPLICATION_NAME
            )
            self._thread.connection = connection
        connection.execute(
            RECORD + "VALUES (%s, %s, %s, %s, %s)", (job, attempt, fence, os.getpid(), phase)
        )


class FileRecorder:
    """Write to a file of the process, which no fault of a database can reach.

    A line is one write, so a killed process leaves whole lines. The times are those of the
    machine's
    monotonic clock, because the wall clock of the process may be wrong.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor: int | None = None
        self._fences: dict[int, int | None] = {}

    async def write(self, job: int, attempt: int | None, fence: int | None, phase: str) -> None:
        """Record one phase."""
        self.now(job, attempt, fence, phase)

    def now(self, job: int, attempt: int | None, fence: int | None, phase: str) -> None:
        """Record one phase, from anywhere."""
        if self._descriptor is None:
            path = self._directory / f"{os.getpid()}.records"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # A run that is adopted under a new claim ends as what it began.
        if phase == "start":
            self._fences[job] = fence
        row = [time.monotonic(), job, attempt, self._fences.get(job, fence), os.getpid(), phase]
        os.write(self._descriptor, json.dumps(row).encode() + b"\n")


def recorder() -> Recorder | FileRecorder:
    """Return the recorder of the environment:

    JUDGE_RECORDS, a directory, or the workers' database.
    """
    directory = os.environ.get("JUDGE_RECORDS")
    return FileRecorder(Path(directory)) if directory else Recorder(os.environ.get("TASKD_DSN", ""))
