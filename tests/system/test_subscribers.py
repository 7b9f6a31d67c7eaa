"""Logical replication to a second database: what stops a subscriber, and what lets it go on."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from tests.cli.test_doctor_restored import assert_is_as_installed, program, run
from tests.system.faults.cluster import Cluster

SETTINGS = {"wal_level": "logical", "wal_retrieve_retry_interval": "100ms"}
WITHIN_S = 30.0
FINISH = """
WITH ended AS (DELETE FROM taskd.job WHERE id = $1 RETURNING *)
INSERT INTO taskd.job_history (id, enqueued_at, run_at, finished_at, expires_at, fence, state,
    priority, attempt, crashes, interrupts, queue, task, args, errors)
SELECT id, enqueued_at, run_at, now(), now() + make_interval(days => $2), 1, 'done',
    priority, 1, 0, 0, queue, task, args, errors
FROM ended
"""


class Pair:
    """The database `taskd` of a server, and its copy `green`, which subscribes to it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def make(self, options: str) -> None:
        """Publish all tables, subscribe to them, and wait for the first copy of each table.

        The copy of a table locks the table, and waits for the end of every transaction of the
        publishing server. Here this is also the subscribing server, so a TRUNCATE that waits for
        the lock would never end.
        """
        blue = self.cluster
        await blue.ask(f"CREATE PUBLICATION everything FOR ALL TABLES {options}")
        await blue.ask("SELECT pg_create_logical_replication_slot('green', 'pgoutput')")
        await blue.ask("CREATE DATABASE green TEMPLATE template0")
        script = str(blue.home / "schema.sql")
        await asyncio.to_thread(
            run, program("pg_dump"), "--schema-only", "--no-publications", f"--file={script}",
            blue.dsn(),
        )  # fmt: skip
        await asyncio.to_thread(
            run, program("psql"), "-X", "-q", "-o", "/dev/null", "-v", "ON_ERROR_STOP=1",
            f"--file={script}", blue.dsn("green"),
        )  # fmt: skip
        await self.green(
            f"CREATE SUBSCRIPTION green CONNECTION 'host={blue.home} port={blue.port} user=taskd "
            "dbname=taskd' PUBLICATION everything WITH (create_slot = false)"
        )
        await self.until(COPIED)

    async def green(self, text: str, *args: object) -> list[asyncpg.Record]:
        return await self.cluster.ask(text, *args, database="green")

    async def enqueue(self) -> int:
        return int((await self.cluster.ask("SELECT taskd.enqueue('t', queue => 'q')"))[0][0])

    async def finish(self, job_id: int, expires_in_days: int) -> None:
        await self.cluster.ask(FINISH, job_id, expires_in_days)

    async def until(self, condition: str, *args: object) -> None:
        """Wait until this is true in the copy."""
        async with asyncio.timeout(WITHIN_S):
            while not (await self.green(f"SELECT {condition}", *args))[0][0]:
                await asyncio.sleep(0.02)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    home = Path(tempfile.mkdtemp(prefix="taskd-subscriber-", dir="/tmp"))
    cluster = Cluster(home / "a", SETTINGS)
    try:
        await cluster.make()
        await migrations.migrate(Database({"dsn": cluster.dsn()}))
        yield Pair(cluster)
    finally:
        await cluster.close()
        shutil.rmtree(home, ignore_errors=True)


LAST_VALUES = """
SELECT format('SELECT setval(%L, %s);', seqrelid::regclass, pg_sequence_last_value(seqrelid))
FROM pg_sequence
WHERE seqrelid IN ('taskd.job_id_seq'::regclass, 'taskd.workflow_id_seq'::regclass)
  AND pg_sequence_last_value(seqrelid) IS NOT NULL
"""
LIVE = "EXISTS (SELECT FROM taskd.job WHERE id = $1)"
ENDED = "EXISTS (SELECT FROM taskd.job_history WHERE id = $1)"
COPIED = "NOT EXISTS (SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r')"
STOPPED = "(SELECT apply_error_count > 0 FROM pg_stat_subscription_stats)"
# Finished jobs are kept for 7 days, so this makes partitions for up to 16 days from now.
NEW_PARTITIONS = "SELECT taskd.make_history_partitions(9)"


async def test_a_new_partition_of_the_history_does_not_stop_a_subscriber_of_the_root(
    pair: Pair,
) -> None:
    before = await pair.enqueue()
    await pair.make("WITH (publish_via_partition_root = true)")
    await pair.until(LIVE, before)
    await pair.cluster.ask(NEW_PARTITIONS)
    await pair.finish(before, 16)
    await pair.until(ENDED, before)
    await pair.until(f"NOT {LIVE}", before)
    assert not (await pair.green(f"SELECT {STOPPED}"))[0][0]
    await asyncio.to_thread(assert_is_as_installed, pair.cluster.dsn())
    await asyncio.to_thread(assert_is_as_installed, pair.cluster.dsn("green"))
    # The switch-over, as the documentation describes it.
    for text, *_ in await pair.cluster.ask(LAST_VALUES):
        await pair.green(text)
    enqueue = "SELECT taskd.enqueue('t', queue => 'q')"
    assert (await pair.green(enqueue))[0][0] == before + 1


async def test_a_new_partition_stops_a_subscriber_of_each_partition_until_it_is_mended(
    pair: Pair,
) -> None:
    await pair.make("")
    first, second = await pair.enqueue(), await pair.enqueue()
    await pair.until(LIVE, second)
    await pair.cluster.ask(NEW_PARTITIONS)
    await pair.finish(first, 16)
    await pair.until(STOPPED)
    third = await pair.enqueue()
    assert not (await pair.green(f"SELECT {LIVE}", third))[0][0]
    # As the doctor and the documentation say.
    await pair.cluster.ask("ALTER PUBLICATION everything SET (publish_via_partition_root = true)")
    await pair.green("SELECT taskd.make_history_partitions(31)")
    await pair.green("TRUNCATE taskd.job_history")
    await pair.green("ALTER SUBSCRIPTION green REFRESH PUBLICATION")
    await pair.until(LIVE, third)
    await pair.until(ENDED, first)
    await pair.cluster.ask("SELECT taskd.make_history_partitions(20)")
    await pair.finish(second, 27)
    await pair.until(ENDED, second)
