"""What the tests of the judge share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.planted import Bug
from tests.system.judge_helpers import Open, Scene


@pytest.fixture
async def scene(dsn: str) -> AsyncIterator[Open]:
    """Opens the scene of this test: `await scene(bug)`."""
    opened: list[Scene] = []

    async def make(bug: Bug | None = None, *, strict: bool = False) -> Scene:
        opened.append(Scene(dsn, bug))
        return await opened[-1].open(strict=strict)

    yield make
    for each in opened:
        await each.close()
