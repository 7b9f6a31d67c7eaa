"""What `taskd bench` makes of its figures."""

from dataclasses import replace

import pytest

from taskd.cli.bench.figures import Figures, Times, limits, rows, to_json

LOCAL = Figures(
    postgresql="18.1",
    durable=True,
    notified=True,
    round_trip=Times(0.1, 0.3),
    commit=Times(2.1, 4.0),
    enqueue_single_per_s=400.0,
    enqueue_clients_per_s=2500.0,
    enqueue_bulk_per_s=45_000.0,
    drain_jobs=20_000,
    drain_per_s=40_000.0,
    drain_cpu=0.4,
    wake_up=Times(1.5, 4.0),
)


def test_a_slow_disk_limits_who_enqueues_one_by_one():
    enqueue, drain = limits(LOCAL)
    assert enqueue == (
        "A commit takes 2.1 ms on this server, so one client can enqueue at most 476 jobs/s one at "
        "a time. Enqueue in bulk: 1,000 per call reached 45,000 jobs/s."
    )
    assert "used 40% of a core and waited the rest of the time" in drain
    assert "25 us per job" in drain


def test_a_far_server_is_reported_apart_from_a_slow_disk():
    far = replace(LOCAL, round_trip=Times(12, 15), commit=Times(13, 20), enqueue_single_per_s=70.0)
    assert limits(far)[0].startswith(
        "A round trip to the server takes 12 ms, and a commit 13 ms, so one client can enqueue at "
        "most 77 jobs/s"
    )


def test_neither_disk_nor_network():
    quick = replace(LOCAL, commit=Times(0.12, 0.3), enqueue_single_per_s=2000.0)
    assert limits(quick)[0].startswith(
        "Enqueueing one job takes 0.5 ms. The round trip and the commit take only 0.12 ms"
    )


def test_measures_that_contradict_each_other_still_make_sentences():
    # The machine was busy with something else while one of them was taken.
    for commit in (0.0, 0.05, 5.0):
        odd = replace(LOCAL, round_trip=Times(0.2, 0.2), commit=Times(commit, commit))
        assert len(limits(odd)) == 2


def test_a_process_that_never_waits_is_the_limit():
    busy = replace(LOCAL, drain_cpu=0.93)
    assert "93% of a core: this process is the limit, not the server" in limits(busy)[1]
    assert "--processes 2" in limits(busy)[1]


def test_what_is_odd_about_the_server_is_reported():
    odd = replace(LOCAL, durable=False, notified=False)
    _, _, pooled, undurable = limits(odd)
    assert "TASKD_LISTEN_DSN" in pooled
    assert "do not wait for the disk" in undurable


def test_the_percentiles_are_of_measured_values():
    hundred = Times.of([n / 1000 for n in range(100, 0, -1)])
    assert (hundred.p50_ms, hundred.p99_ms) == (50.5, 99.0)
    assert Times.of([0.002]) == Times(2.0, 2.0)


@pytest.mark.parametrize("row", rows(LOCAL), ids=lambda row: row["what"])
def test_a_line_has_a_rate_or_times(row):
    assert ("per_s" in row) is not ("times" in row)


def test_the_json_has_every_figure_and_the_sentences():
    assert to_json(LOCAL)["wake_up"] == {"p50_ms": 1.5, "p99_ms": 4.0}
    assert to_json(LOCAL)["limits"] == limits(LOCAL)
