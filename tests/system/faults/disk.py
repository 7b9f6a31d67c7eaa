"""A disk of the test's own that can be filled up, and a cluster on it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import RawIOBase
from pathlib import Path

import pytest

from tests.system.faults.cluster import Cluster


@asynccontextmanager
async def small_disk(megabytes: int) -> AsyncIterator[Path]:
    """A directory on a disk of its own that can be filled up."""
    if os.geteuid() != 0:
        pytest.skip("a small disk needs root, to mount a tmpfs")
    place = Path(tempfile.mkdtemp(prefix="taskd-disk-", dir="/tmp"))
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "none", str(place)]
    done = subprocess.run(mounting, capture_output=True, check=False)
    if done.returncode:
        place.rmdir()
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


@asynccontextmanager
async def stuffed(filler: Path) -> AsyncIterator[None]:
    """No room on the disk of this file for the length of a block."""
    stuffing = asyncio.create_task(_stuff(filler), name="stuffing")
    try:
        yield
    finally:
        stuffing.cancel()
        await asyncio.wait({stuffing})
        filler.unlink()


async def _stuff(filler: Path) -> None:
    """Use all free space, also space that is freed later, until cancelled."""
    with filler.open("ab", buffering=0) as file:
        while True:
            await asyncio.to_thread(_fill, file)
            await asyncio.sleep(0.02)


def _fill(file: RawIOBase) -> None:
    size = 65536
    while size:
        try:
            file.write(b"x" * size)
        except OSError:
            size //= 2


class ClusterOnDisk:
    """A cluster on a small disk; its log of changes on the same one or elsewhere."""

    def __init__(self, *, wal: bool) -> None:
        self._wal = wal
        self._elsewhere: Path | None = None

    async def __aenter__(self) -> tuple[Cluster, Path]:
        self._disk = small_disk(220)
        place = await self._disk.__aenter__()
        self._cluster = Cluster(place / "a")
        try:
            await self._cluster.make()
            if not self._wal:
                await self._move_wal()
        except BaseException:
            await self.__aexit__()
            raise
        return self._cluster, place

    async def _move_wal(self) -> None:
        self._elsewhere = Path(tempfile.mkdtemp(prefix="taskd-wal-", dir="/tmp"))
        await self._cluster.stop()
        wal = self._cluster.data / "pg_wal"
        shutil.move(wal, self._elsewhere / "pg_wal")
        wal.symlink_to(self._elsewhere / "pg_wal")
        shutil.copystat(self._cluster.data, self._elsewhere)
        await self._cluster.start()

    async def __aexit__(self, *_: object) -> None:
        await self._cluster.close()
        await self._disk.__aexit__(None, None, None)
        if self._elsewhere is not None:
            shutil.rmtree(self._elsewhere)
