"""The state machine in its short form, and the bugs that it must find."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.planted_bugs import Bug, FunctionBug, OutOfDate, planted
from tests.store import machine

EXAMPLES = 100
# Each may take a minute on a busy machine.
pytestmark = pytest.mark.timeout(600)
# Found late in the hundred examples, or behind them: pytest -m long.
MORE_EXAMPLES = 1000
LATE = {
    "a deadline that counts as a good end",
    "a cancelled job that keeps its place in the line",
    "a newer version that only a good end begins",
    "a rescue from those who are only late",
    "an addition by an attempt that has lost its job",
    "a retry that begins the fences anew",
    "a key that a claim does not free",
    "added jobs for which nothing waits",
    "a restart that keeps the place in the limit",
    # The judge's planted bugs have them in their short form (tests/system/test_judge_planted.py).
    "a crash that is charged to suspects alone",
    "a crash that is charged to all who ran",
}


def test_the_statements_do_what_the_model_says(dsn: str) -> None:
    machine.play(dsn, EXAMPLES, steps=25)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_statements_do_what_the_model_says_for_longer(dsn: str) -> None:
    """Without the bugs in LATE, the examples that find them pass."""
    machine.play(dsn, MORE_EXAMPLES)


# Plausible mistakes in the real statements.
STATEMENTS = {
    "a claim that leaves the fence": planted(
        "claim_jobs", (r"job\.fence \+ \$8", "job.fence + 0 * $8")
    ),
    "an ack without the fence": planted(
        "ack_done", (r"AND job\.fence = [^\n]*\n", "AND $3::bigint[] IS NOT NULL\n")
    ),
    "a rescue from those who are only late": planted(
        "rescue_jobs",
        (
            r"AND worker\.died_at IS NULL",
            "AND worker.died_at IS NULL AND worker.lease_until > now()",
        ),
    ),
    "a newer version that only a good end begins": planted(
        "ack_outcomes",
        (r"WHEN follower IS NOT NULL THEN", "WHEN follower IS NOT NULL AND state = 'done' THEN"),
    ),
    "an older version that is retried although a newer one follows": planted(
        "ack_outcomes",
        (r"AND ack\.state IN \('scheduled', 'queued'\) AS superseded", "AND false AS superseded"),
    ),
    "a deadline that counts as a good end": planted(
        "expire_jobs", (r"array_agg\('failed'::text\)", "array_agg('done'::text)")
    ),
    "a crash that is charged to all who ran": planted(
        "rescue_jobs", (r"AND \(death\.in_group OR death\.no_group\)", "")
    ),
    "a crash that is charged to suspects alone": planted(
        "rescue_jobs", (r"OR job\.crashes = 0 AS no_group", "AS no_group")
    ),
    "lines that are said too late and stand for those in time": planted(
        "write_logs", (r"WHERE NOT log\.ended OR [^\n]*\n\s+RETURNING 1", "RETURNING 1")
    ),
}
STILL_HOLDS = r"AND \(j\.key_scope = 'live' OR j\.worker_id IS NULL\)"
FUNCTIONS = {
    "a key that a claim does not free": FunctionBug(
        "enqueue_unique",
        (
            (
                r" AND \(CASE WHEN [^)]+\) = enqueue_unique\.unique_key\s+AND j\.id IS",
                " AND j.id IS",
            ),
            # Both conditions under which the holder is locked: with one of them, the function would
            # look for another holder without end.
            (STILL_HOLDS + r"(?=\s+FOR UPDATE;\s+IF NOT FOUND)", ""),
            (STILL_HOLDS + r"(?=\s+FOR UPDATE;\s+CONTINUE)", ""),
        ),
    ),
    "two ends at once that count as one": FunctionBug(
        "count_parents", ((r"count\(\*\)::integer AS parents", "1 AS parents"),)
    ),
    "added jobs for which nothing waits": FunctionBug(
        "await_added",
        ((r"SET waits_for = job\.waits_for \+ more\.parents", "SET node = job.node"),),
    ),
    "an addition by an attempt that has lost its job": FunctionBug(
        "add_to_workflow",
        (
            (r"AND j\.worker_id = worker_id AND j\.fence = fence\) THEN", ") THEN"),
            (r"AND j\.worker_id = worker_id AND j\.fence = fence AND j\.state", "AND j.state"),
        ),
    ),
    "a limit that counts one too few": FunctionBug(
        "admit_keys", ((r"THEN rule\.concurrency - \(", "THEN 1 + rule.concurrency - ("),)
    ),
    "a cancelled job that keeps its place in the line": FunctionBug(
        "cancel_live", ((r"\(ended\.state = 'queued' OR gate IN", "(false AND gate IN"),)
    ),
    "a completion that leaves those who waited for it": FunctionBug(
        "complete", ((r"PERFORM taskd\.unblock\(vars\.ended, [^\n]*\n", ""),)
    ),
    "a restart that keeps the place in the limit": FunctionBug(
        "restart", ((r"PERFORM taskd\.free_places\([^\n]*\n", ""),)
    ),
    "a deletion that keeps the key": FunctionBug(
        "delete", ((r"AND k\.job_id = ANY \(gone\)", "AND false"),)
    ),
    "a retry that begins the fences anew": FunctionBug(
        "retry", ((r"past\.timeout_s, past\.fence,", "past.timeout_s, 0,"),)
    ),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_each_bug_fits_its_statement_exactly_once(name: str) -> None:
    STATEMENTS[name].text()


async def test_each_bug_fits_its_function_exactly_once(sql: Any) -> None:
    for bug in FUNCTIONS.values():
        await bug.plant(sql)


def test_a_bug_that_does_not_fit_is_not_taken_for_one_that_was_found(dsn: str) -> None:
    twice = planted("claim_jobs", (r"job\.", "job."))
    with pytest.raises(OutOfDate, match="times in claim_jobs"):
        machine.play(dsn, 1, bugs=[twice])


def examples_of(name: str) -> int:
    return MORE_EXAMPLES if name in LATE else EXAMPLES


def rated(names: Iterable[str]) -> list[Any]:
    return [pytest.param(each, marks=[pytest.mark.long] * (each in LATE)) for each in names]


@pytest.mark.parametrize("name", rated(STATEMENTS))
def test_a_bug_in_a_statement_is_found(dsn: str, name: str) -> None:
    bugs: list[Bug] = [STATEMENTS[name]]
    with pytest.raises(AssertionError):
        machine.play(dsn, examples_of(name), bugs=bugs)


@pytest.mark.parametrize("name", rated(FUNCTIONS))
def test_a_bug_in_a_function_is_found(dsn: str, name: str) -> None:
    with pytest.raises(AssertionError):
        machine.play(dsn, examples_of(name), function_bugs=[FUNCTIONS[name]])
