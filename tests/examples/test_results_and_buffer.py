"""The README's examples of results, progress, middleware and the buffer, with a worker beside."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import taskd
from tests.examples.test_readme_tour import blocks

TIMER = """
import contextlib

times = []

@contextlib.asynccontextmanager
async def timer(name):
    yield times.append(name)
"""


def block(begin: str) -> str:
    [found] = [text for language, text in blocks() if language == "python" and begin in text]
    return found


async def run(source: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run lines of an example, and return what they have set."""
    body = textwrap.indent(source, "    ")
    exec(f"async def example():\n{body}\n    return locals()", names)  # the README's own lines
    found: dict[str, Any] = await names["example"]()
    return found


@pytest.fixture
def module(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = home / "readme_results"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "imports.py").write_text(block("# myapp/imports.py") + TIMER)
    monkeypatch.syspath_prepend(home)
    import importlib

    registry = taskd.core.registry.Registry()
    monkeypatch.setattr("taskd.core.middleware.DEFAULT", registry)
    return importlib.import_module("readme_results.imports")


async def test_results_and_the_buffer_as_the_readme_shows_them(
    home: Path, dsn: str, module: Any
) -> None:
    environ = os.environ | {"TASKD_DSN": dsn, "PYTHONPATH": os.pathsep.join(sys.path)}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", "run", "--app", "readme_results.imports", cwd=home,
        env=environ, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with taskd.configure(dsn) as client:
            names = {"import_rows": module.import_rows, "client": client}
            assert (await run(block("job.result("), names))["told"] == {"imported": 2}
            buffered = await run(block("client.buffered("), names)
            assert await buffered["job"].result() == {"imported": 1}
    finally:
        await taskd.aclose_default()
        worker.terminate()
        assert await worker.wait() == 0


def test_the_readme_links_to_its_parts() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-")
        for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
