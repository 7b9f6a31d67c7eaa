"""Commands on a database whose event trigger refuses DDL: an error where DDL is the purpose."""

from __future__ import annotations

from tests.store.helpers import REFUSE_DDL

WHY = "(SQLSTATE P0001, raised by public.refuse_ddl()). Nothing of it was written."


def refuse_ddl(shell):
    for statement in REFUSE_DDL.rsplit("\nCREATE ", 1):
        shell.sql(statement if statement.startswith("\n") else f"CREATE {statement}")


def test_keep_sets_the_times_and_says_that_their_partitions_are_missing(taskd):
    refuse_ddl(taskd)
    result = taskd("queues", "keep", "email", "--done", "60d", code=1)
    assert "email" in result.stdout
    assert "the times of queue 'email' are set, but their partitions" in result.stderr
    assert f"no CREATE TABLE outside of a deployment {WHY}" in result.stderr
    assert taskd.sql("SELECT keep_done_s FROM taskd.queue WHERE name = 'email'") == [(5184000,)]
    # Its partitions exist: nothing is to be made.
    assert taskd("queues", "keep", "email", "--done", "7d").stderr == ""


def test_migrations_and_roles_are_refused_with_the_reason(taskd, empty):
    refuse_ddl(empty)
    stderr = empty("db", "migrate", code=1).stderr
    assert "0001_baseline failed: no CREATE SCHEMA outside of a deployment" in stderr
    refuse_ddl(taskd)
    stderr = taskd("db", "roles", "--prefix", "refused", code=1).stderr
    assert f"outside of a deployment {WHY}" in stderr


def test_other_commands_need_no_ddl(taskd):
    refuse_ddl(taskd)
    taskd("enqueue", "send", "to=ada", "--queue", "email")
    taskd("queues", "set", "email", "--max-depth", 5, "--max-running", 2)
    taskd("queues", "pause", "email")
    taskd("db", "migrate")
    taskd("db", "check")
