"""The documentation is right: every block runs, and every link has a target."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from taskd.config import Settings
from tests.contracts import blocks, docs
from tests.tasks.http_server import serving as web_serving
from tests.tasks.smtp_server import serving as mail_serving

PAGES = blocks.pages()
NAMES = [str(page.relative_to(blocks.CHECKOUT)) for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)
# An index page shows the README, so its links must be absolute.
REPOSITORY = "https://github.com/pgtaskd/taskd/blob/main/"
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]*)\)")


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@pytest.fixture
async def stand_ins(dsn: str) -> AsyncIterator[Any]:
    """What stands for the hosts and ports that pages name, for a text; and their variables."""
    async with AsyncExitStack() as stack:

        async def made(text: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
            names = {"postgresql://app@db.example.org/app": dsn}
            environ = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
            if "mail.example.org" in text:
                mail = await stack.enter_async_context(mail_serving())
                names["mail.example.org"] = "127.0.0.1"
                environ |= {"TASKD_SMTP_PORT": str(mail.port), "TASKD_SMTP_TLS": "off"}
            if "hooks.example.org" in text:
                web = await stack.enter_async_context(web_serving())
                names["https://hooks.example.org"] = f"http://localhost:{web.port}"
                names["hooks.example.org"] = f"localhost:{web.port}"
                environ["TASKD_HTTP_NETWORKS"] = "127.0.0.1"
            for port in sorted(set(re.findall(r"\b(?:127\.0\.0\.1|localhost):(\d{4,5})\b", text))):
                free = free_port()
                names |= {f"{host}:{port}": f"{host}:{free}" for host in ("127.0.0.1", "localhost")}
            return names, environ

        yield made


async def walk(page: Path, text: str, home: Path, dsn: str, stand_ins: Any) -> docs.Page:
    found = blocks.blocks(page, text)
    names, environ = await stand_ins(text)
    reader = docs.Page(home, dsn, environ, names)
    try:
        for block in found:
            await asyncio.to_thread(reader.walk, block)
    finally:
        await asyncio.to_thread(reader.close)
    return reader


@pytest.mark.timeout(240)
@each_page
async def test_every_block_of_a_page_does_what_the_page_says(
    page: Path, home: Path, dsn: str, stand_ins: Any
) -> None:
    await walk(page, page.read_text(encoding="utf-8"), home, dsn, stand_ins)


# Words.


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    found: dict[str, int] = {}
    text = re.sub(r"(?ms)^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"))
    for head in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head)
        slug = re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {
        slug if not n else f"{slug}-{n}" for slug, most in found.items() for n in range(most + 1)
    }


@each_page
def test_a_reader_can_paste_the_python_of_a_page(page: Path) -> None:
    assert list(blocks.names_of_hidden_code(blocks.blocks(page))) == []


def test_a_name_that_only_hidden_code_defines_is_found() -> None:
    text = "<!-- python\nimport os\n-->\n\n```python\nprint(os.name, len('a'))\n```\n"
    [found] = blocks.names_of_hidden_code(blocks.blocks(blocks.CHECKOUT / "README.md", text))
    assert found.endswith(": os")


@each_page
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.removeprefix(REPOSITORY).partition("#")
        if path.startswith("http"):
            continue
        folder = blocks.CHECKOUT if link.startswith(REPOSITORY) else page.parent
        target = (folder / path).resolve() if path else page
        assert target.exists(), link
        assert target.is_relative_to(blocks.CHECKOUT), link
        if anchor:
            assert anchor in anchors(target), link


def test_links_of_the_readme_work_on_an_index_page() -> None:
    text = (blocks.CHECKOUT / "README.md").read_text(encoding="utf-8")
    for link in [*LINK.findall(text), *re.findall(r"!\[[^\]]*\]\(([^)\s]*)\)", text)]:
        assert link.startswith(("https://", "#")), link


@each_page
def test_every_command_and_variable_that_a_page_mentions_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    known = {f"TASKD_{each.name.upper()}" for each in fields(Settings)}
    known |= {"TASKD_TEST_DSN", "TASKD_JOB_ID", "TASKD_ATTEMPT", "TASKD_MAX_ATTEMPTS"}
    known |= {"TASKD_IDEMPOTENCY_KEY"}  # the settings of run_command, and of the tests
    assert set(re.findall(r"\bTASKD_[A-Z_]*[A-Z]\b", text)) <= known
    prose = re.sub(r"(?ms)^( *)```.*?^\1```$", "", text)
    for span in re.findall(r"`(taskd [a-z][^`]*)`", prose):
        for words in blocks.taskd_commands(span.replace("...", "").replace("|", " ")):
            assert wrong_with(words) is None, span


def wrong_with(words: list[str]) -> str | None:
    try:
        blocks.check_command(words)
    except (click.MissingParameter, click.BadOptionUsage):
        return None  # a command or an option is named by its words alone
    except click.UsageError as error:
        # Capitals stand for what a reader puts in.
        return None if any(word.isupper() for word in words) else error.message
    return None


def test_every_page_is_named_by_the_first_one() -> None:
    index = blocks.DOCS / "README.md"
    linked = {
        (index.parent / link.partition("#")[0]).resolve()
        for link in LINK.findall(index.read_text())
    }
    assert set(PAGES) - linked - {index, blocks.CHECKOUT / "README.md"} == set()


@each_page
def test_a_page_begins_with_its_title(page: Path) -> None:
    text = re.sub(r"(?s)<!--.*?-->", "", page.read_text(encoding="utf-8"))
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert sum(bool(re.match(r"# ", line)) for line in without_code(lines)) == 1


def without_code(lines: list[str]) -> list[str]:
    kept, inside = [], False
    for line in lines:
        if line.strip().startswith("```"):
            inside = not inside
        elif not inside:
            kept.append(line)
    return kept


# The test that runs the pages finds what is wrong.

BROKEN = {
    "python that raises": ("python", "1 / 0", "ZeroDivisionError"),
    "a module that does not import": ("python", "# a/b.py\nimport nowhere_at_all", "nowhere"),
    "sql that is wrong": ("sql", "SELECT taskd.enqueue('x')", "no worker has published"),
    "a command that fails": ("sh", "taskd jobs show 4711", "exit code 3"),
    "a command that does not exist": ("sh", "taskd jobs peek", "peek"),
    "a shell that fails": ("sh", "taskd health | grep nothing", "exit code 1"),
    "a setting that does not exist": ("toml", "# taskd.toml\nqeues = []", "qeues"),
    "yaml that is none": ("yaml", "a: [", "flow node"),
    "a language that is none": ("klingon", "x", "klingon"),
}
BROKEN_TEXTS = {
    name: (f"```{kind}\n{code}\n```", words) for name, (kind, code, words) in BROKEN.items()
}
BROKEN_TEXTS |= {
    "another exit code": ("<!-- exit code: 4 -->\n```sh\ntaskd health\n```", "0, not 4"),
    "an option that does not exist": (
        "<!-- not run: no -->\n```sh\ntaskd run --qeue x\n```",
        "qeue",
    ),
    "what was not said": ("```sh\ntaskd health\n```\n```text\nill\n```", "was not said"),
    "no failure": ("<!-- fails: KeyError -->\n```python\nx = 1\n```", "it should fail"),
    "a mark that is none": ("<!-- not-run: why -->\n```sh\nx\n```", "no mark"),
    "a mark far above": ("<!-- not run: why -->\n\n```sh\nx\n```", "right above"),
    "a block without an end": ("```sh\nx\n", "without an end"),
    "python that is none": ("<!-- not run: no -->\n```python\nfor\n```", "invalid syntax"),
    "not in its file": ("<!-- from: LICENSE -->\n```text\nfree beer\n```", "is not in LICENSE"),
}


@pytest.mark.parametrize("name", BROKEN_TEXTS)
async def test_a_block_that_is_wrong_is_found(
    name: str, home: Path, dsn: str, stand_ins: Any
) -> None:
    text, words = BROKEN_TEXTS[name]
    with pytest.raises(Exception, match=re.escape(words)):
        await walk(blocks.DOCS / "README.md", text, home, dsn, stand_ins)


GOOD = """
```python
# app/jobs.py
from taskd import task

@task(queue="sums")
async def add(a: int, b: int) -> int:
    return a + b
```
```python
from app.jobs import add
x = await add.enqueue(1, 2)
```
```sh
taskd run --app app.jobs
taskd jobs list --queue sums --state done
```
```text
1  done  sums  add  1/20  finished 3ms ago
```
<!-- python
y = await x.result()
assert y == 3
-->
```sql
SELECT state, count(*) FROM taskd.jobs GROUP BY state;
```
```text
done | 1
```
```sh
echo "$(taskd jobs list --queue sums --json)" | grep -c add
```
"""


async def test_blocks_of_all_kinds_go_on_from_each_other(
    home: Path, dsn: str, stand_ins: Any
) -> None:
    await walk(blocks.DOCS / "README.md", GOOD, home, dsn, stand_ins)
