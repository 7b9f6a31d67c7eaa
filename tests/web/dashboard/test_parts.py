"""What the pages are made of: charts, graphs, stories and words, without a database."""

from datetime import UTC, datetime, timedelta

from taskd.core.stored_json import PastError
from taskd.web.pages.charts import HEIGHT, chart
from taskd.web.pages.job_timeline import timeline
from taskd.web.pages.render import json_text, line, pace, query, share, text
from taskd.web.pages.workflow_graph import graph

NOW = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)


def rows(*steps):
    since = NOW - timedelta(hours=1)
    return [
        {"since": since, "until": NOW, "step": step, "done": done, "failed": failed,
         "cancelled": 0, "wait_s": wait, "run_s": [0.1, 0.2]}
        for step, done, failed, wait in steps
    ]  # fmt: skip


def test_a_chart_shows_what_is_little_beside_what_is_much():
    made = chart(rows((0, 9999, 1, [0.1, 0.3]), (59, 10, 0, None)), 60, 3600)
    assert made.bars_top == "10,000"
    assert all(bar.height >= 1.5 and -2 <= bar.y <= HEIGHT for bar in made.bars)
    assert {bar.kind for bar in made.bars} == {"done", "failed"}
    assert "9,999 done, 1 failed" in made.bars[0].tooltip
    assert (made.done, made.failed, made.empty, made.shortened) == (10009, 1, False, False)


def test_a_line_has_holes_where_nothing_ran():
    made = chart(
        rows((0, 1, 0, [1, 2]), (1, 1, 0, [1, 2]), (5, 1, 0, [1, 2]), (9, 1, 0, None)), 10, 3600
    )
    [wait] = [each for each in made.lines if each.kind == "wait-p95"]
    assert wait.path.count("M") == 2
    assert len(wait.dots) == 1
    assert made.lines_top == "2s"
    assert made.latest["wait_p95"] == 2


def test_an_empty_chart_is_empty():
    [nothing] = rows((None, 0, 0, None))
    made = chart([nothing], 60, 3600)
    assert made.empty
    assert made.tooltip == "no job finished in 1h"


def test_a_part_stands_right_of_what_it_waits_for():
    def part(name, *after, **states):
        return {"part": name, "after": list(after), "states": states, "first_id": 1}

    made = graph(
        [
            part("a", done=1),
            part("b", done=3, failed=1),
            part("c", "a", "b", blocked=1),
            part("d", "c"),
        ]
    )
    places = {box.name: (box.x, box.y) for box in made.boxes}
    assert places["a"][0] == places["b"][0] < places["c"][0] < places["d"][0]
    assert places["a"][1] < places["b"][1]
    states = {box.name: (box.state, box.state_counts) for box in made.boxes}
    assert states["b"] == ("failed", "1 failed, 3 done")
    assert states["d"] == ("planned", "-")
    assert len(made.edges) == 3


def test_of_many_parts_the_first_are_drawn():
    parts = [
        {"part": f"p{n}", "after": [], "states": {"done": 1}, "first_id": n} for n in range(300)
    ]
    made = graph(parts)
    assert (len(made.boxes), made.left_out) == (200, 100)


def test_a_story_shows_attempts_that_are_not_kept():
    began = NOW + timedelta(seconds=1)
    job = {
        "enqueued_at": NOW, "schedule": None, "run_at": NOW,
        "errors": [PastError(n, began, None, "E", "m") for n in (1, 9)],
        "state": "failed", "started_at": NOW, "finished_at": NOW + timedelta(seconds=3),
        "attempt": 9, "reason": "E: m", "actions": [],
    }  # fmt: skip
    titles = [each.title for each in timeline(job)]
    assert titles == [
        *("enqueued", "attempt 1 failed", "attempts 2 to 8 are not kept", "attempt 9 failed"),
        "failed",
    ]
    odd = job | {"errors": [PastError()], "attempt": 1}
    assert [each.at for each in timeline(odd)][1] is None


def test_strangers_texts_keep_to_their_line_and_length():
    assert line("a\n\tb\u202e\x00 c") == "a b\\u202e\\x00 c"
    assert len(line("x" * 1_000_000)) == 200
    long = text("y" * 100_000)
    assert long.endswith("… and 80,000 more characters")
    assert json_text('{"a": "<b>"}') == '{\n  "a": "<b>"\n}'


def test_numbers_and_addresses_are_written_for_people():
    assert [pace(each) for each in (0, 13.888, 0.07, 0.0001)] == [
        "0/s",
        "13.9/s",
        "4.2/m",
        "0.36/h",
    ]
    assert [share(each, 1000) for each in (0, 1, 310)] == ["0 %", "<1 %", "31 %"]
    assert query("/jobs", {"state": ["a", "b"], "queue": "", "x": None}) == "/jobs?state=a&state=b"
    assert query("/jobs", {}) == "/jobs"
