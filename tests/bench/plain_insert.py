"""The floor for enqueueing: the rows that taskd writes, by plain prepared INSERTs without NOTIFY.

The harness runs it in place of a driver: `plain_insert.py enqueue JSON`.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.environ["BENCH_COMMON"])

import asyncpg
import common  # type: ignore[import-not-found]

ONE = "INSERT INTO taskd.job (queue, task, args) VALUES ('bench', 'noop', $1) RETURNING id"
MANY = (
    "INSERT INTO taskd.job (queue, task, args) "
    "SELECT 'bench', 'noop', a FROM unnest($1::jsonb[]) AS a RETURNING id"
)


async def enqueue(options: dict) -> None:
    connections = [await asyncpg.connect(common.DSN) for _ in range(10)]
    ones = [await each.prepare(ONE) for each in connections]
    many = await connections[0].prepare(MANY)

    async def one(client: int, number: int) -> None:
        await ones[client].fetch(f'{{"i":{number}}}')

    async def bulk(count: int) -> None:
        await many.fetch([f'{{"i":{number}}}' for number in range(count)])

    await common.timed_enqueue(options, one, bulk)


if __name__ == "__main__":
    common.main(enqueue=enqueue)
