"""The pytest plugin as users have it: in a pytest of its own, on the example project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROJECT = HERE / "shop_project"
ROOT = HERE.parents[1]
PAGE = (ROOT / "taskd/docs/howto/testing.md").read_text(encoding="utf-8")
# Whether or not taskd is installed with its entry point here, the plugin is there once.
PLUGINS = ("-p", "taskd.testing.plugin", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider")
WITHIN_S = 100.0


def pytest_in(home: Path, *args: str, dsn: str | None = None, code: int = 0) -> str:
    """Run pytest in a directory; what it prints."""
    outer = ("PYTEST_", "TASKD_TEST_DSN")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)} | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(home), *sys.path]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "COLUMNS": "120",
    }
    if dsn is not None:
        environ["TASKD_TEST_DSN"] = dsn
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, f"--basetemp={home / 'basetemp'}", *args],
        cwd=home,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the example project."""
    made = tmp_path / "project"
    shutil.copytree(PROJECT, made, ignore=shutil.ignore_patterns("__pycache__"))
    return made


def databases(server: Any) -> set[str]:
    import asyncio

    import asyncpg

    async def ask() -> set[str]:
        connection = await asyncpg.connect(server.admin_dsn)
        try:
            rows = await connection.fetch("SELECT datname FROM pg_database")
        finally:
            await connection.close()
        return {row[0] for row in rows}

    return asyncio.run(ask())


PLUGINS_OWN = re.compile(r"taskd_test_[0-9a-f]{8}_")
PAGE_FILE = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_tests_of_the_example_project_pass_and_leave_no_database(
    project: Path, server: Any
) -> None:
    output = pytest_in(project, "-q", dsn=server.admin_dsn)
    assert re.search(r"^11 passed", output, re.MULTILINE), output
    assert not {name for name in databases(server) if PLUGINS_OWN.match(name)}


def test_without_a_dsn_a_server_is_started_for_the_session(project: Path) -> None:
    assert "2 passed" in pytest_in(project, "-q", "-k", "plain_code or nothing_of_another")


def test_a_dsn_can_stand_in_the_configuration(project: Path) -> None:
    output = pytest_in(project, "-q", "-o", "taskd_test_dsn=mysql://x/y", code=1)
    assert "taskd_test_dsn: its scheme is 'mysql'; taskd supports only postgresql://" in output


def test_a_server_that_cannot_be_reached_is_reported_in_a_line(project: Path) -> None:
    output = pytest_in(project, "-q", dsn="postgresql://nobody@127.0.0.1:1/postgres", code=1)
    assert "no database for tests with taskd: PostgreSQL cannot be reached" in output
    assert "Traceback" not in output
    assert "connection.py" not in output


def test_a_failure_says_what_was_enqueued_instead_at_the_line_of_the_test(
    project: Path, server: Any
) -> None:
    (project / "test_shop.py").write_text(
        "from shop.jobs import charge\n"
        "from shop.orders import place\n\n\n"
        "async def test_it(taskd_db):\n"
        "    await place(order=7, cents=1250)\n"
        "    taskd_db.assert_enqueued(charge, order=7, cents=1000)\n"
    )
    output = pytest_in(project, dsn=server.admin_dsn, code=1)
    for line in (
        ">       taskd_db.assert_enqueued(charge, order=7, cents=1000)",
        "AssertionError: charge(order=7, cents=1000) is not enqueued.",
        "1 job of charge waiting, with other arguments:",
        "cents: wanted 1000, is 1250",
        "test_shop.py:7: AssertionError",
    ):
        assert line in output, output
    assert "def assert_enqueued" not in output


def test_the_error_of_a_handler_is_shown_with_the_line_that_raised_it(
    project: Path, server: Any
) -> None:
    (project / "test_shop.py").write_text(
        "from shop.jobs import confirm\n\n\n"
        "async def test_it(taskd_db):\n"
        "    await confirm.enqueue(order=7, to='ada@example.org')\n"
        "    await taskd_db.run_all(check=True)\n"
    )
    output = pytest_in(project, dsn=server.admin_dsn, code=1)
    for line in (
        'raise OSError(f"there is no mail server here for {to}: {text}")',
        "AttemptFailed: 1 of 1 jobs failed:",
        "confirm(order=7, to='ada@example.org'): scheduled, due in ",
    ):
        assert line in output, output


def test_what_a_test_asks_wrongly_is_reported_at_its_own_line(project: Path, server: Any) -> None:
    (project / "test_shop.py").write_text(
        "from shop.jobs import charge\n\n\n"
        "def test_no_task(taskd_db):\n"
        "    taskd_db.assert_enqueued(print)\n\n\n"
        "def test_no_argument(taskd_db):\n"
        "    taskd_db.assert_enqueued(charge, odrer=7)\n\n\n"
        "def test_no_job(taskd_db):\n"
        "    taskd_db.run_all_sync(crash=[17])\n\n\n"
        "def test_back(taskd_db):\n"
        "    taskd_db.travel(-3)\n"
    )
    output = pytest_in(project, dsn=server.admin_dsn, code=1)
    for line in (
        "TypeError: <built-in function print> is not a task: give what @task has made, or a",
        "TypeError: task charge has no argument 'odrer'; it has order, cents",
        "ValueError: crash: these jobs did not run, as they were not due: 17",
        "ValueError: travel(-3): time moves only forward, by seconds above zero",
    ):
        assert line in output, output
    for number in (5, 9, 13, 17):
        assert re.search(rf"^test_shop.py:{number}: (Type|Value)Error$", output, re.MULTILINE), (
            output
        )


def test_the_example_of_the_page_passes(tmp_path: Path, server: Any) -> None:
    files = dict(PAGE_FILE.findall(PAGE))
    for name in ("myapp/jobs.py", "tests/test_jobs.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(files[name])
    output = pytest_in(tmp_path, "-q", "-o", "asyncio_mode=auto", dsn=server.admin_dsn)
    assert re.search(r"^\d passed", output, re.MULTILINE), output


def test_pytest_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [(name, module)] = project["entry-points"]["pytest11"].items()
    assert name == "taskd"
    assert import_module(module).taskd_db


def test_a_test_without_the_fixture_cannot_reach_the_database_of_the_settings(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKD_DSN", dsn)
    (tmp_path / "test_accident.py").write_text(
        "import pytest\n"
        "from taskd import Client, task\n"
        "from taskd.errors import ConfigError\n"
        "@task(queue='accident')\n"
        "def work() -> None: ...\n"
        "def test_default_client():\n"
        "    work.enqueue_sync()\n"
        "async def test_client_without_dsn():\n"
        "    async with Client() as client:\n"
        "        await client.enqueue(work.job())\n"
        "def test_with_fixture(taskd_db):\n"
        "    work.enqueue_sync()\n"
        "    taskd_db.assert_enqueued(work)\n"
    )
    output = pytest_in(tmp_path, "-o", "asyncio_mode=auto", dsn=dsn, code=1)
    assert "2 failed, 1 passed" in output, output
    assert output.count("ConfigError: a test must not use the database") >= 2, output
    allowed = pytest_in(
        tmp_path, "-o", "asyncio_mode=auto", "-o", "taskd_real_database=true", dsn=dsn
    )
    assert "3 passed" in allowed, allowed
