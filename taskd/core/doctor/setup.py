"""What can be said without a database: settings, the DSN, the embedded server."""

from __future__ import annotations

from collections.abc import Iterator

from taskd.core.doctor.finding import Facts, Said, advice, error, ok, only, warning


def settings(facts: Facts) -> Iterator[Said]:
    """Whether all that is set can be read and is known."""
    setup = only(facts, "setup")
    if setup["refused"]:
        yield error(setup["refused"], advice("`taskd config` lists every setting."))
        return
    for sentence in setup["ignored"]:
        yield warning(
            sentence, advice("Correct its name, or unset it. `taskd config` lists the settings.")
        )
    given = ", ".join(setup["given"]) or "nothing"
    yield ok(f"{given} is set; the rest is as by default")


def dsn(facts: Facts) -> Iterator[Said]:
    """Where the database is said to be."""
    setup = only(facts, "setup")
    if setup["refused"]:
        yield error("it is not known, as the settings cannot be read")
    elif setup["dsn"]:
        yield ok(f"{setup['dsn']}, from {setup['dsn_source']}")
    elif setup["embedded_off"]:
        yield error(
            "no DSN is configured, and the embedded PostgreSQL is switched off",
            advice("Set TASKD_DSN or DATABASE_URL to postgresql://user@host/database."),
        )
    else:
        yield ok("none is configured: the embedded PostgreSQL is used")


def embedded(facts: Facts) -> Iterator[Said]:
    """The embedded server: whether it is used, runs, and has room."""
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
    state = "runs" if status["running"] else "does not run; whoever needs it starts it"
    if free is not None and free < FREE_BYTES_MIN:
        yield warning(
            f"its disk has {free // 2**20:,} MB left",
            advice(f"Make room on the disk of {status['home']}."),
        )
    yield ok(f"in {status['home']}, {status['data_bytes'] // 2**20:,} MB; it {state}")


FREE_BYTES_MIN = 512 * 2**20


def reach(facts: Facts) -> Iterator[Said]:
    """Whether the database answers."""
    row = only(facts, "reach")
    if row["error"] is not None:
        yield error(row["error"], advice(row["mend"]))
    else:
        yield ok(f"it answers, as the login {row['login']}")
