"""The mail server of `taskd demo`, which defers some of the mails, and keeps the rest as files."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from taskd.errors import ConfigError

HOST = "127.0.0.1"
HEAD_BYTES = 16 * 1024
# Every folder of a demo contains a file with this name. The mails in the queue name their folder;
# the demo uses the named folder only if it contains this file.
MARKER = ".taskd-demo"
BUSY = "451 4.3.2 The demo's mail server defers this mail (--fail-rate); try again"

_MESSAGE_ID = re.compile(rb"^Message-ID:\s*(<[^>]+>)", re.IGNORECASE | re.MULTILINE)


class Folder:
    """A folder of mails, `00001.eml`, `00002.eml`, ...

    Mails that the folder already contains are also counted.

    Attributes:
        copies: number of copies of each mail, by Message-ID.

    Raises:
        OSError: the folder cannot be made or written to.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / MARKER).touch()
        self.path = path
        self.copies: Counter[str] = Counter()
        self._number = 0
        for file in path.glob("*.eml"):
            if file.stem.isdecimal():
                self._number = max(self._number, int(file.stem))
                with file.open("rb") as opened:
                    self._count(opened.read(HEAD_BYTES))

    @property
    def duplicates(self) -> int:
        """Return how many mails repeat the Message-ID of an earlier mail."""
        return self.copies.total() - len(self.copies)

    def add(self, content: bytes) -> Path:
        """Keep a mail; return its path. A killed run leaves no partial `.eml` file."""
        self._number += 1
        file = self.path / f"{self._number:05}.eml"
        half = file.with_suffix(".part")
        half.write_bytes(content)
        half.rename(file)
        self._count(content[:HEAD_BYTES])
        return file

    def _count(self, head: bytes) -> None:
        found = _MESSAGE_ID.search(head)
        if found:
            self.copies[found[1].decode("ascii", "replace")] += 1


class Sink:
    """The handler that aiosmtpd calls.

    Args:
        folder: the folder for the mails.
        fail_rate: the share of mails to defer, 0 to 1.
    """

    def __init__(self, folder: Folder, fail_rate: float) -> None:
        self._folder = folder
        self._fail_rate = fail_rate

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
        """Accept a mail, or defer it. The file is written before the reply."""
        if random.random() < self._fail_rate:
            return BUSY
        try:
            self._folder.add(envelope.content)
        except OSError as error:
            return f"452 4.3.1 The mail cannot be kept: {error.strerror}"
        return "250 2.0.0 Kept"


@asynccontextmanager
async def serving(folder: Folder, fail_rate: float) -> AsyncIterator[int]:
    """Run the mail server on a free port of this machine; yield the port.

    Raises:
        ConfigError: aiosmtpd is not installed.
    """
    try:
        from aiosmtpd.smtp import SMTP
    except ImportError:
        raise ConfigError(
            "the demo needs the mail server aiosmtpd: pip install 'pgtaskd[demo]'"
        ) from None
    # aiosmtpd logs two lines per SMTP command. Writing them would take longer than the mails.
    logging.getLogger("mail.log").setLevel(logging.ERROR)
    loop = asyncio.get_running_loop()
    sink = Sink(folder, fail_rate)
    server = await loop.create_server(
        lambda: SMTP(sink, hostname="localhost", loop=loop, enable_SMTPUTF8=True), HOST, 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
