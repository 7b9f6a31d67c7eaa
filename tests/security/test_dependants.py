"""Jobs with many dependants: what a producer enqueues behind a job costs that job's end little."""

from __future__ import annotations

from typing import Any

FAMILY = """
WITH run AS (
    INSERT INTO taskd.workflow (name, kind) VALUES ('w', 'workflow') RETURNING id
), parent AS (
    INSERT INTO taskd.job (queue, task, workflow_id) SELECT 'q', 'parent', id FROM run
    RETURNING id, workflow_id
)
SELECT id, workflow_id FROM parent
"""
UNBLOCK = "SELECT taskd.unblock(ARRAY[$1::bigint], ARRAY[$2::text])"
CHILDREN = """
WITH child AS (
    INSERT INTO taskd.job (queue, task, state, workflow_id, waits_for)
    SELECT 'q', 'child', 'blocked', $2::bigint, 1 FROM generate_series(1, $3::integer)
    RETURNING id
)
INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed)
SELECT $1::bigint, id, $2::bigint, 'cancel' FROM child
"""


async def family(sql: Any, children: int) -> int:
    """Insert a job with this number of dependants; return its id."""
    parent, run = await sql.fetchrow(FAMILY)
    await sql.execute(CHILDREN, parent, run, children)
    return int(parent)


async def test_dependants_of_one_job_in_one_transaction_write_its_row_once(sql: Any) -> None:
    parent = await sql.fetchval("SELECT taskd.enqueue('parent', queue => 'q')")
    async with sql.transaction():
        await sql.execute(
            f"SELECT taskd.enqueue_after('t', '{{}}', ARRAY[{parent}], queue => 'q') "
            "FROM generate_series(1, 100)"
        )
        updates = (
            "SELECT n_tup_upd FROM pg_stat_xact_user_tables WHERE relid = 'taskd.job'::regclass"
        )
        assert await sql.fetchval(updates) == 1
    assert await sql.fetchval("SELECT count(*) FROM taskd.dependency") == 100


@pytest.mark.parametrize("state", ["failed", "done"])
async def test_ten_times_the_dependants_cost_about_ten_times_as_much(sql: Any, state: str) -> None:
    """Nested loops over all of them took a hundred times as long: 40 s for 16,000."""
    took = []
    for children in (800, 8000):
        parent = await family(sql, children)
        await sql.execute("ANALYZE taskd.job; ANALYZE taskd.dependency")
        began = time.monotonic()
        unblocked = await sql.fetchval(UNBLOCK, parent, state)
        took.append(time.monotonic() - began)
        assert unblocked == children
    assert took[1] < 40 * took[0] + 1.0
