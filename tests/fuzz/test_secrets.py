"""A redacted argument is in no log line, no row and no command's output, in any kind of handler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from taskd.client import Client
from taskd.errors import TaskdError
from tests.conftest import TestServer
from tests.fuzz import secret_app as app
from tests.fuzz import strategies as odd
from tests.fuzz.live import Live
from tests.fuzz.test_cli import invoke
from tests.fuzz.test_errors import CANARY, secrets, tellings

# Threads of the worker draw numbers of their own while hypothesis draws its examples.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module inside strategies")
KEPT = "SELECT errors, result, reason FROM taskd.jobs"


@pytest.fixture(scope="module")
def live(server: TestServer) -> Iterator[Live]:
    name = server.create()
    made = Live(server.dsn(name), app.REGISTRY, threads=2, process_slots=1, concurrency=8)
    yield made
    made.close()
    server.drop(name)


def unseen(text: object, where: str) -> None:
    at = str(text).find(CANARY[:-2])
    assert at < 0, f"{where}: ...{str(text)[max(0, at - 300) : at + 60]}"


@odd.examples(1)
@given(secret=secrets.map(lambda text: text[:5000]), retells=st.booleans())
@example(f"{CANARY} a'b\"c\\d\n{CANARY}", True)
@example(CANARY, False)
def test_a_secret_is_nowhere_whatever_kind_of_handler_shows_it(
    live: Live, secret: str, retells: bool
) -> None:
    live.clear()
    app.RETELLS[:] = [True] if retells else []
    numbers = range(len(tellings(secret)))

    async def run() -> list[int]:
        jobs = [task.job(secret, n) for task in app.PLAIN for n in numbers]
        jobs += [task.job(app.Secret(secret, n)) for task in app.BATCHES for n in numbers]
        ids = await live.desk.enqueue(*jobs)
        rows = await live.ended(ids)
        assert {row["state"] for row in rows.values()} <= {"failed", "cancelled"}
        for row in await live.sql.fetch(KEPT):
            unseen(tuple(row), "a row")
        async with Client(live.dsn) as client:
            for job_id in ids[:: len(numbers) - 1]:
                with pytest.raises(TaskdError) as caught:
                    await client.result(job_id, timeout_s=20)
                unseen(repr(caught.value), "a client's error")
        return ids

    ids = live.run(run())
    for name, fields in live.emitted.all:
        unseen(fields, name)
    quoted = str(ids[len(ids) // 2])
    for command in (
        ["jobs", "list", "--state", "failed"],
        ["stats", "errors", "--json"],
        ["jobs", "show", quoted],
        ["why", quoted],
    ):
        said = invoke(live, command)
        assert said.exit_code in (0, 4), (command, said.output)
        unseen(said.output, " ".join(command))
    live.run(live.sql.execute("TRUNCATE taskd.job_history"))
    live.unharmed()
