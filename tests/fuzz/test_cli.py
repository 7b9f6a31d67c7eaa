"""Any command line and any stdin: a documented exit code, words for people, JSON for programs."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st

from taskd.cli import EXIT_CODES, cli
from tests.canary import assert_unseen
from tests.fuzz import strategies as odd
from tests.fuzz.conftest import Ground
from tests.fuzz.live import Live

COMMANDS = [
    "enqueue", "enqueue -", "jobs list", "jobs show", "jobs retry", "jobs cancel", "jobs set", "why",
    "workflows list", "workflows show", "workflows cancel", "queues list", "queues pause", "queues resume",
    "queues keep", "queues limit", "schedules list", "schedules set", "schedules next", "schedules pause",
    "schedules run", "schedules delete", "limits list", "limits set", "limits clear", "workers", "tasks list",
    "tasks pause", "stats", "stats errors", "health", "config", "completion", "", "db status",
]  # fmt: skip
FLAGS = [
    "--json", "--queue", "--priority", "--in", "--at", "--max-attempts", "--timeout", "--deadline",
    "--unique-key", "--key-scope", "--key-for", "--on-conflict", "--debounce-max", "--version", "--ids",
    "--task", "--state", "--since", "--limit", "--reason", "--every", "--cron", "--timezone", "--rate",
    "--burst", "--concurrency", "--concurrency-in-all", "--args", "--for", "--until", "--done", "--failed",
    "--max-depth", "--max-running", "--window", "--help", "-v", "-q", "--", "-", "--all", "--count", "--yes",
    "--starts-at", "--jitter", "--query", "--catch-up", "--overlap", "--unredacted", "--run-at", "--key",
]  # fmt: skip
VALUES = [
    "t", "q", "s", "l", "1", "0", "-1", "9223372036854775807", "9223372036854775808", "99999999999999999999",
    "1e30", "1e30s", "1e308d", "1e400", "nan", "inf", "0s", "30s", "-5m", "36500d", "36501d", "999999999d",
    "2026-12-01T08:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00Z",
    "20261201T080000Z", "a=b", "a:=1", "a:=1e400", "a:={", 'a:="\\ud800"', "=x", ":=1", "{}", '{"a":1}',
    '{"a":1,"a":2}', "[]", "null", "failed", "live", "* * * * *", "0 0 30 2 *", "Europe/Berlin", "../..",
    "SELECT 1", "none", "skip", "5e-324", "1e-320", "0.5/s", "9" * 5000, "x" * 10_000, "1 year", "\u0663",
]  # fmt: skip
# The kernel passes no NUL; what is no UTF-8 comes as lone surrogates of this half.
words = st.one_of(
    st.sampled_from(VALUES),
    odd.texts.map(lambda text: re.sub("[\0\ud800-\udc7f\udd00-\udfff]", "", text)),
    odd.json_texts.map(lambda text: "a:=" + re.sub("[\0\ud800-\udfff]", "", text)[:2000]),
)
lines = st.lists(
    st.one_of(
        st.sampled_from(COMMANDS).map(str.split), st.sampled_from(FLAGS).map(lambda flag: [flag]),
        st.tuples(st.sampled_from(FLAGS), words).map(list), words.map(lambda word: [word]),
    ),
    max_size=4,
)  # fmt: skip
commands = st.tuples(st.sampled_from(COMMANDS).map(str.split), lines).map(
    lambda pair: [*pair[0], *itertools.chain(*pair[1])]
)
# What waits for a person, a signal or a minute.
SLOW = {"run", "demo", "bench", "shell"}


@pytest.fixture(autouse=True, scope="module")
def empty_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A command line can write only there, and no settings file is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cli"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


def invoke(ground: Ground | Live, args: list[str], stdin: bytes = b"") -> Result:
    environ = {"TASKD_DSN": ground.dsn, "COLUMNS": "80"}
    return CliRunner().invoke(cli, args, input=stdin, env=environ, prog_name="taskd")


def assert_documented(result: Result, args: list[str]) -> None:
    """A documented code; a message where there is need of one; nothing that steers a terminal."""
    said = (args, result.exit_code, result.stdout[-800:], result.stderr[-1500:])
    assert result.exit_code in EXIT_CODES, said
    assert "Traceback" not in result.stderr, said
    assert "mistake in taskd" not in result.stderr, said
    if result.exit_code not in (0, 4):
        assert result.stderr.strip(), said
    assert not re.search(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]", result.stdout), said
    assert_unseen(result.output)
    as_json = (
        "--json" in args and "enqueue" not in args and "--help" not in args and "-h" not in args
    )
    if as_json and result.exit_code == 0 and result.stdout.startswith(("{", "[")):
        for line in result.stdout.splitlines():
            json.loads(line)


@odd.examples(30)
@given(args=commands)
@example(["enqueue", "t", "--queue", "q", "--in", "1e30"])
@example(["enqueue", "t", "--queue", "q", "--at", "0001-01-01T00:00:00+14:00"])
@example(["enqueue", "t", "--queue", "q", "--deadline", "1e300d"])
@example(["enqueue", "t", "--queue", "q", "\udcff=1"])
@example(["limits", "set", "l", "--rate", "5e-324"])
@example(["jobs", "list", "--since", "36500d"])
@example(["jobs", "list", "--task", "\udcff"])
@example(["schedules", "set", "s", "t", "--every", "1e300s"])
def test_any_command_line_ends_with_a_documented_code(ground: Ground, args: list[str]) -> None:
    if SLOW & set(args):
        return
    assert_documented(invoke(ground, args), args)


# --- NDJSON -----------------------------------------------------------------------------------------

KEYS = [
    "task", "args", "queue", "priority", "run_at", "delay_s", "in", "max_attempts", "timeout_s", "deadline",
    "deadline_s", "unique_key", "key_scope", "for_s", "on_conflict", "debounce_max_s", "version", "odd",
]  # fmt: skip
members = st.tuples(
    st.sampled_from(KEYS),
    st.one_of(odd.json_texts, words.map(json.dumps), odd.json_values.map(json.dumps)),
).map(lambda pair: f'"{pair[0]}":{pair[1]}')
good = st.integers(0, 99).map(lambda n: f'{{"task":"t","queue":"q","args":{{"n":{n}}}}}')
written = st.one_of(
    st.lists(members, max_size=3).map(lambda said: "{" + ",".join(['"task":"t"', '"queue":"q"', *said]) + "}"),
    odd.json_texts,
    st.sampled_from(["", "  ", "{", "\ufeff" + '{"task":"t","queue":"q"}', "[]", "nul", '{"task":"t"}', '"\udcff"']),
)  # fmt: skip


@odd.examples(30)
@given(
    before=st.lists(good, max_size=2),
    line=written,
    after=st.lists(good, max_size=2),
    end=st.sampled_from(["\n", "\r\n"]),
)
@example([], '{"task":"t","queue":"q","args":{"a":"\\ud800"}}', ['{"task":"t","queue":"q"}'], "\n")
@example([], '{"task":"t","queue":"q","args":{"a":1e400000}}', ['{"task":"t","queue":"q"}'], "\n")
@example([], '{"task":"t","queue":"q","run_at":"0001-01-01T00:00:00+14:00"}', [], "\n")
def test_lines_are_enqueued_all_or_none_and_the_wrong_one_is_named(
    ground: Ground, before: list[str], line: str, after: list[str], end: str
) -> None:
    ground.clear()
    args = ["enqueue", "-"]
    lines = [*before, line, *after]
    result = invoke(ground, args, end.join(lines).encode(errors="surrogatepass"))
    assert_documented(result, args)
    there = ground.one("SELECT count(*) FROM taskd.job")
    if result.exit_code == 0:
        assert there == sum(bool(each.strip()) for each in lines), result.stderr
    else:
        assert there == 0, result.stderr
        wrong = re.search(r"line (\d+)", result.stderr)
        assert wrong, result.stderr
        assert int(wrong[1]) >= len(before) + 1, result.stderr


# --- what is shown ----------------------------------------------------------------------------------


@odd.examples(6)
@given(text=odd.storable_texts, value=odd.json_values, name=odd.storable_texts)
@example("\x1b[2J\x1b]0;owned\x07\u202e\x9b31m", {"\x1b[31m": "\x07"}, "")
def test_nothing_that_is_stored_steers_a_terminal(
    ground: Ground, text: str, value: Any, name: str
) -> None:
    ground.clear()
    task = (re.sub(r"[\x01-\x1f\x7f-\x9f]", "", name) or "t")[:40]
    error = json.dumps(
        {"type": text, "message": text, "traceback": text, "attempt": 1, "worker": 1}
    )
    ground.fetch(
        """
        INSERT INTO taskd.job_history (id, enqueued_at, run_at, started_at, finished_at, expires_at, fence,
            state, priority, attempt, crashes, interrupts, queue, task, reason, args, errors)
        VALUES (7, now(), now(), now(), now(), now() + interval '1 day', 1, 'failed', 100, 1, 0, 0, 'q',
            $1, left($2, 100), $3::text::jsonb, jsonb_build_array($4::text::jsonb))
        """,
        task, text, json.dumps({"a": value}), error,
    )  # fmt: skip
    ground.fetch("SELECT taskd.set_schedule($1, $1, every => '1 h', queue => 'q')", task)
    for line in (
        "jobs list",
        "jobs show 7",
        "why 7",
        "stats",
        "stats errors",
        "schedules list",
        "jobs retry 7",
    ):
        for args in (line.split(), [*line.split(), "--json"]):
            if args[:2] == ["jobs", "retry"] and "--json" in args:
                continue
            result = invoke(ground, args)
            assert_documented(result, args)
            assert result.exit_code == 0, (args, result.stderr)
            assert (
                not re.search(
                    "[\x07\x0e-\x1f\x7f-\x9f\u202e\u200b]", re.sub(r"\x1b\[\d*m", "", result.output)
                )
                or "--json" in args
            ), (args, result.output)
            assert "\x1b" not in result.output, (args, result.output)


@pytest.mark.parametrize(
    "args",
    [
        ["enqueue", "t", "--queue", "q", b"\xff=\xfe"],
        ["enqueue", b"\x1b[31m\xff"],
        ["jobs", "show", b"\xff"],
        [b"\xff"],
    ],
    ids=repr,
)
def test_bytes_that_are_no_text_get_a_message(ground: Ground, args: list[Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "taskd", *args],
        env=os.environ | {"TASKD_DSN": ground.dsn}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stderr
