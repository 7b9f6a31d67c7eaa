"""What `taskd doctor` decides from rows: the cases that no server can be brought into in a test."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import taskd
from taskd.core.doctor import jobs, server, settings, setup, storage
from taskd.core.doctor.checks import CHECKS, statements
from taskd.core.doctor.finding import (
    Check,
    Level,
    count,
    hint,
    names,
    ok,
    run_check,
    size,
    span,
    warning,
)
from taskd.core.doctor.objects import expected
from taskd.core.doctor.schema import expected_grants
from taskd.store.connections.statements import load as queries
from taskd.store.reading import doctor as store
from taskd.store.schema.repairs import load, render

NOW = datetime(2026, 11, 1, tzinfo=UTC)
SERVER = {
    "version": "18.1", "major": 18, "standby": False, "clock": NOW, "database": "shop",
    "encoding": "UTF8",
    "login": "ada",
    "hidden": False, "superuser": False, "allowed": 100, "reserved": 3, "used": 20, "ours": 7,
    "workers_hold": 3,
    "holders": ["17 by the login ada (shop)", "3 by the login ada (taskd)"],
    "database_allowed": -1, "database_used": 20, "login_allowed": -1, "login_used": 7,
    "notify_usage": 0.0, "xid_age": 1000, "mxid_age": 1, "up_s": 60.0,
}  # fmt: skip


def worst(decide, **facts):
    """Return the level and the text of the finding about these rows."""
    finding = run_check(Check("c", "about", "why", (), decide), facts, {})
    return finding.level, " ".join(finding.found)


@pytest.mark.parametrize(
    ("used", "late_s", "level", "words"),
    [
        (20, -9, "ok", "live workers (2) hold 3 connections, and open up to 14 when"),
        (87, -9, "warning", "14 when all are busy; the server has only 10 left"),
        (87, 1, "ok", "live workers (0) hold 3 connections, and open up to 3 "),
    ],
)
def test_connections_that_busy_workers_lack_are_reported_before_they_are_needed(
    used, late_s, level, words
):
    row = {"status": '{"connections": 7}', "late_s": late_s}
    facts = {"doctor_server": [SERVER | {"used": used}], "doctor_workers": [row, row]}
    found = worst(server.worker_connections, **facts)
    assert found[0] == level
    assert words in found[1]


def of_server(decide, **more):
    rows = more.pop("rows", [])
    return worst(decide, doctor_server=[SERVER | more], doctor_listeners=rows)


@pytest.mark.parametrize(
    ("decide", "more", "level", "words"),
    [
        (server.version, {}, "ok", "until 2030-11-14"),
        (server.version, {"major": 14, "version": "14.9"}, "error", "needs 15"),
        (server.version, {"major": 15, "clock": NOW + timedelta(days=500)}, "warning", "no more"),
        (server.version, {"major": 21, "version": "21.0"}, "hint", "tested with 15 to 18"),
        (server.primary, {"standby": True}, "error", "standby"),
        (server.connections, {}, "ok", "20 of 97"),
        (server.connections, {"used": 97}, "error", "none is left; they are held 17 by the login"),
        (server.connections, {"used": 90}, "warning", "7 are left"),
        (server.connections, {"login_allowed": 10}, "warning", "login ada is allowed 10"),
        (server.connections, {"login_allowed": 10, "superuser": True}, "ok", ""),
        (server.wraparound, {"xid_age": 600_000_000}, "warning", "600,000,000"),
        (server.wraparound, {"mxid_age": 1_600_000_000}, "error", "1,600,000,000"),
        (server.notify_queue, {}, "ok", "0.0%"),
        (server.notify_queue, {"notify_usage": 0.2}, "warning", "a session that listens"),
        (server.notify_queue, {"notify_usage": 0.9}, "error", "90"),
    ],
)
def test_a_server_is_judged_by_its_figures(decide, more, level, words):
    found = of_server(decide, **more)
    assert found[0] == level
    assert words in found[1]


@pytest.mark.parametrize(
    ("row", "level"),
    [
        ({"kind": "session", "age_s": 299.0}, "ok"),
        ({"kind": "session", "age_s": 301.0}, "warning"),
        ({"kind": "session", "age_s": 4000.0}, "error"),
        ({"kind": "session", "age_s": None, "xids": 10}, "ok"),
        ({"kind": "prepared", "age_s": 4000.0}, "error"),
        ({"kind": "slot", "xids": 2_000_000}, "warning"),
        ({"kind": "slot", "catalog_xids": 2_000_000}, "ok"),
        ({"kind": "slot", "catalog_xids": 30_000_000}, "warning"),
        ({"kind": "standby", "xids": 500_000}, "ok"),
        ({"kind": "standby", "xids": 30_000_000}, "error"),
    ],
)
def test_a_snapshot_is_judged_by_its_age_or_by_what_began_since(row, level):
    held = dict.fromkeys(("age_s", "xids", "catalog_xids"))
    held |= {"pid": 1, "name": "n", "login": "l", "application": "a", "state": "idle"}
    held["query_start"] = NOW
    found = worst(storage.held_snapshots, doctor_snapshots=[held | row], doctor_server=[SERVER])
    assert found[0] == level


def test_sessions_of_others_are_unknown_to_whom_they_are_hidden():
    held = {"pid": 1, "kind": "session", "age_s": None, "xids": 5, "catalog_xids": None}
    facts = {"doctor_snapshots": [held], "doctor_server": [SERVER | {"hidden": True}]}
    assert worst(storage.held_snapshots, **facts)[0] == "unknown"


@pytest.mark.parametrize(
    ("row", "dead", "vacuum"),
    [
        ({"dead": 4000, "due_at": 1000, "idle_s": 60.0}, "ok", "ok"),
        ({"dead": 4000, "due_at": 1000, "idle_s": 4000.0}, "ok", "warning"),
        ({"dead": 900_000, "due_at": 1000, "idle_s": 60.0}, "ok", "ok"),
        ({"dead": 900_000, "due_at": 1000, "idle_s": 700.0}, "warning", "ok"),
        ({"dead": 3_000_000, "due_at": 1000, "idle_s": 60.0}, "warning", "ok"),
        ({"dead": 900_000, "due_at": 800_000, "idle_s": 4000.0}, "ok", "ok"),
    ],
)
def test_dead_rows_are_judged_by_when_vacuum_would_come(row, dead, vacuum):
    table = {"table": "job", "live": 5, "enabled": True, "vacuumed_ago_s": None} | row
    facts = {"doctor_tables": [table], "doctor_locks": []}
    assert worst(storage.dead_tuples, **facts)[0] == dead
    assert worst(storage.autovacuum, **facts)[0] == vacuum


@pytest.mark.parametrize(
    ("row", "level"),
    [
        ({"age_s": 5.0}, "ok"),
        ({"age_s": 61.0}, "warning"),
        ({"age_s": 61.0, "waiting": 3}, "error"),
        ({"age_s": 5.0, "waiting": 3}, "ok"),
        ({"age_s": None}, "ok"),
        ({"age_s": None, "waiting": 1}, "error"),
        ({"age_s": 5000.0, "mode": "ShareUpdateExclusiveLock"}, "ok"),
        ({"age_s": 61.0, "mode": "ShareUpdateExclusiveLock", "waiting": 1}, "error"),
    ],
)
def test_a_lock_is_judged_by_its_age_and_who_waits(row, level):
    lock = {"pid": 1, "login": "l", "application": "", "table": "job", "mode": "ExclusiveLock",
            "waiting": 0} | row  # fmt: skip
    assert worst(storage.table_locks, doctor_locks=[lock])[0] == level


def test_a_small_index_is_never_bloated():
    index = {"name": "job_claim", "table": "job", "valid": True, "live": 0, "bytes": 2**20}
    assert worst(storage.index_bloat, doctor_indexes=[index])[0] == "ok"
    assert worst(storage.index_bloat, doctor_indexes=[index | {"bytes": 2**30}])[0] == "warning"


def test_settings_of_time_are_read_with_their_units():
    events = [settings._ms(each) for each in ("250", "250ms", "2s", "1min", "1h", "0")]
    assert events == [250, 250, 2000, 60_000, 3_600_000, 0]


def test_many_partitions_want_room_for_locks():
    here = [
        {"scope": "", "login": None, "name": name, "setting": value}
        for name, value in (
            ("max_locks_per_transaction", "64"),
            ("max_connections", "20"),
            ("max_prepared_transactions", "0"),
        )
    ]
    facts = {"doctor_settings": here, "doctor_server": [SERVER]}
    few = worst(settings.settings, **facts, doctor_partitions=[{}] * 8)
    many = worst(settings.settings, **facts, doctor_partitions=[{}] * 60)
    assert (few[0], many[0]) == ("ok", "hint")


def test_a_full_disk_of_the_embedded_server_is_reported():
    status = {"running": True, "kept": False, "home": "/data", "data_bytes": 2**26}
    facts = {"refused": None, "dsn": None, "embedded_off": False, "embedded_refused": None,
             "embedded_status": status, "embedded_free_bytes": 2**28}  # fmt: skip
    assert worst(setup.embedded, setup=[facts])[0] == "warning"
    assert worst(setup.embedded, setup=[facts | {"embedded_free_bytes": 2**32}])[0] == "ok"
    assert worst(setup.embedded, setup=[facts | {"embedded_refused": "no programs"}])[0] == "error"


def test_a_limit_that_is_full_is_no_fault():
    limit = {
        "kind": "limit",
        "name": "crm",
        "known": True,
        "allowed": None,
        "concurrency": 1,
        "rate": None,
        "counted": 1,
        "blocked": 500,
        "blocked_s": 9000.0,
        "opens_late_s": None,
        "counted_ago_s": None,
    }
    assert worst(jobs.limits, doctor_limits=[limit], doctor_workers=[])[0] == "ok"
    assert (
        worst(jobs.limits, doctor_limits=[limit | {"counted": 0}], doctor_workers=[])[0] == "error"
    )
    waits = limit | {"counted": 0, "rate": 0.001, "opens_late_s": -500.0}
    assert worst(jobs.limits, doctor_limits=[waits], doctor_workers=[])[0] == "ok"


# Findings.


def test_the_worst_comes_first_and_what_is_well_is_left_out():
    check = Check("c", "about", "why", (), lambda _: [ok("fine"), hint("a"), warning("b")])
    finding = run_check(check, {}, {})
    assert (finding.level, finding.found) == (Level.WARNING, ("b", "a"))


def test_what_was_refused_is_unknown_with_its_reason():
    check = Check("c", "about", "why", ("rows",), lambda facts: facts["rows"])
    finding = run_check(check, {}, {"rows": "not permitted"})
    assert (finding.level, finding.found) == (Level.UNKNOWN, ("not permitted",))


def test_names_are_stable_and_each_statement_is_needed():
    events = [check.name for check in CHECKS]
    assert len(set(events)) == len(events)
    assert set(statements(CHECKS)) == {name for name in queries() if name.startswith("doctor_")}


def test_the_page_lists_each_check():
    page = (Path(taskd.__file__).parent / "docs" / "howto" / "doctor.md").read_text("utf-8")
    checks = page.split("## The checks")[1]
    listed = re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \|$", checks, re.MULTILINE)
    assert listed == [(check.name, check.about, check.why) for check in CHECKS]


def test_figures_are_short():
    assert [span(each) for each in (3, 61, 3600, 90_061)] == ["3s", "1m 1s", "1h", "1d 1h"]
    assert [size(each) for each in (512, 2**20, 1.5 * 2**30)] == ["512 bytes", "1 MB", "1.5 GB"]
    assert (count(1, "job"), count(2000, "job")) == ("1 job", "2,000 jobs")
    assert names(range(7)) == "0, 1, 2, 3, 4 and 2 more"


# What is read from sql/.


def test_every_statement_of_the_schema_is_known():
    text = store.schema_objects()
    lines = re.findall("(?m)^CREATE .*", text["migrations"])
    made = [line for line in lines if not line.startswith("CREATE SCHEMA")]
    parts = ("column", "constraint", "identity", "partition")  # a CREATE TABLE makes them, too
    wanted = [each for (kind, _), each in expected(**text).items() if kind not in parts]
    own = [each for each in wanted if "_default_" not in each.name or each.name in str(made)]
    own = [each for each in own if not each.name.startswith("mark_")]  # made in a loop
    assert len(own) == len(made)


def test_the_grants_are_those_of_the_script():
    wanted = expected_grants(store.grants_text())
    assert ("table", "job", None, "DELETE", "worker") in wanted
    assert ("table", "job", "state", "UPDATE", "worker") in wanted
    assert not {each for each in wanted if each[1] == "job" and each[-1] == "producer"}
    assert ("function", "enqueue", None, "EXECUTE", "producer") in wanted
    assert ("schema", "taskd", None, "USAGE", "observer") in wanted
    assert {role for *_, role in wanted} == {"producer", "worker", "observer", "admin"}


def test_values_are_quoted():
    assert render("drop_slot", {"slot": "it's"}) == "SELECT pg_drop_replication_slot('it''s');"
    assert render("end_prepared", {"gid": "a\\b"}) == "ROLLBACK PREPARED E'a\\\\b';"
    assert render("reindex", {"index": 'a"b'}) == 'REINDEX INDEX CONCURRENTLY taskd."a""b";'
    with pytest.raises(ValueError, match="invalid literal"):
        render("end_session", {"pid": "1); DROP TABLE taskd.job; --"})


def test_every_repair_is_used_and_ends():
    import inspect

    from taskd.core.doctor import object_repairs, objects, schema

    modules = (object_repairs, objects, schema, server, settings, storage, jobs)
    code = "".join(inspect.getsource(module) for module in modules)
    for name, text in load().items():
        assert f'"{name}"' in code, name
        assert text.endswith((";", ":text:")), name
