"""`taskd demo` as a newcomer runs it, and when it is killed half-way."""

from __future__ import annotations

import asyncio
import email
import email.policy
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg

from taskd.cli.demo import command as demo
from taskd.cli.demo import mail_sink
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.store.reading.demo import LeftJob
from taskd.tasks.send_email import Mailer


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "taskd", "demo", *options]


def environment(dsn: str | None, home: Path) -> dict[str, str]:
    place = {"TASKD_DSN": dsn} if dsn else {"TASKD_DATA_DIR": str(home / "data")}
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": root, "HOME": str(home), "TMPDIR": str(home)} | place


def run_demo(
    dsn: str | None, home: Path, *options: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        command(*options),
        env=environment(dsn, home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended


def message_ids(folder: Path) -> Counter[str]:
    mails = [
        email.message_from_bytes(file.read_bytes(), policy=email.policy.default)
        for file in folder.glob("*.eml")
    ]
    return Counter(str(mail["Message-ID"]) for mail in mails)


def test_without_any_database(home: Path) -> None:
    ended = run_demo(None, home, "--jobs", "50", "--until-empty")
    [folder] = home.glob("taskd-demo-*")
    ids = message_ids(folder)
    assert len(ids) == ids.total() == 50
    assert "50 of 50 done, 0 failed" in ended.stdout
    assert "50 mails, 0 duplicates" in ended.stdout
    assert str(folder) in ended.stdout
    assert "embedded PostgreSQL" in ended.stderr


def test_retries_are_seen(dsn: str, home: Path) -> None:
    folder = home / "mails"
    ended = run_demo(
        dsn, home, "--jobs", "40", "--until-empty", "--fail-rate", "0.3", "--dir", str(folder)
    )
    assert len(message_ids(folder)) == 40
    assert "40 of 40 done" in ended.stdout
    assert "retries       0" not in ended.stdout


async def test_kill_it_and_run_it_again(dsn: str, home: Path, sql: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        *command("--jobs", "400", "--concurrency", "5", "--until-empty"),
        env=environment(dsn, home),
        cwd=home,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    while await sql.fetchval("SELECT count(*) FROM taskd.job_history") < 20:
        await asyncio.sleep(0.02)
    process.kill()
    await process.wait()
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") > 0
    ended = await asyncio.to_thread(run_demo, dsn, home, "--jobs", "10", "--until-empty")
    [folder] = home.glob("taskd-demo-*")
    ids = message_ids(folder)
    assert len(ids) == 410
    assert f"{ids.total() - 410} duplicates" in ended.stdout
    assert "from an earlier run" in ended.stdout
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_history WHERE state = 'done'") == 410


async def test_it_goes_on_until_ctrl_c(dsn: str, home: Path, sql: Any) -> None:
    folder = home / "mails"
    process = await asyncio.create_subprocess_exec(
        *command("--jobs", "5", "--dir", str(folder)),
        env=environment(dsn, home),
        cwd=home,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    while b"try next" not in await process.stdout.readline():
        pass
    own = {"to": "you@example.org", "subject": "Hello", "body": "It works."}
    await sql.execute("SELECT taskd.enqueue('send_email', $1::jsonb)", json.dumps(own))
    while not (folder / "00006.eml").exists():
        await asyncio.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = await process.communicate()
    assert process.returncode == 0
    assert b"taskd enqueue send_email" in stderr


def test_it_does_not_swallow_real_mails(dsn: str, home: Path) -> None:
    async def enqueue() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.execute("SELECT taskd.enqueue('send_email', queue => 'email')")
        await connection.close()

    asyncio.run(enqueue())
    ended = run_demo(dsn, home, "--jobs", "5", "--until-empty", code=78)
    assert "the queue email contains 1 mails of another app" in ended.stderr


def test_without_the_mail_server(dsn: str, home: Path) -> None:
    (home / "aiosmtpd").mkdir()
    (home / "aiosmtpd" / "__init__.py").write_text("raise ImportError")
    ended = run_demo(dsn, home, "--jobs", "5", "--until-empty", code=78)
    assert "pip install 'pgtaskd[demo]'" in ended.stderr


def test_a_folder_that_cannot_be(dsn: str, home: Path) -> None:
    (home / "file").touch()
    ended = run_demo(dsn, home, "--jobs", "5", "--dir", str(home / "file" / "x"), code=78)
    assert "cannot be used" in ended.stderr


def test_it_writes_only_where_a_demo_has_written(tmp_path: Path) -> None:
    earlier, foreign = tmp_path / "earlier", tmp_path / "foreign"
    foreign.mkdir()
    mail_sink.Folder(earlier)
    left = [LeftJob(n, "send_email", path) for n, path in enumerate((None, str(foreign), "/gone"))]
    fresh = demo._folder(None, left).path
    assert fresh.name.startswith("taskd-demo-")
    shutil.rmtree(fresh)
    left.append(LeftJob(9, "send_email", str(earlier)))
    assert demo._folder(None, left).path == earlier
    assert demo._folder(foreign, left).path == foreign


async def test_a_full_disk_is_no_reason_to_fail_a_mail(tmp_path: Path) -> None:
    folder = mail_sink.Folder(tmp_path / "mails")
    shutil.rmtree(folder.path)
    envelope = SimpleNamespace(content=b"Subject: Hi\r\n\r\n")
    assert (await mail_sink.Sink(folder, 0.0).handle_DATA(None, None, envelope)).startswith("452 ")


def test_every_shipped_mail_can_be_sent(tmp_path: Path) -> None:
    registry = Registry()
    registry.add(Mailer(Settings(smtp_host="localhost")).task())
    task = registry.get("send_email")
    assert task is not None
    count = len(demo.MAILS.read_text(encoding="utf-8").splitlines())
    jobs = list(demo._mails(2 * count, tmp_path))
    assert len({job.args for job in jobs}) == 2 * count
    for job in jobs:
        assert task.decode(job.args)["headers"][demo.FOLDER_HEADER] == str(tmp_path)
        assert job.queue == "email"


def test_a_folder_counts_what_lies_in_it(tmp_path: Path) -> None:
    folder = mail_sink.Folder(tmp_path)
    for number in (1, 2, 1):
        folder.add(b"Subject: Hi\r\nMessage-ID: <%d@example.org>\r\n\r\nHi\r\n" % number)
    (tmp_path / "00009.eml").write_bytes(b"")
    (tmp_path / "notes.eml").write_bytes(b"Message-ID: <9@example.org>\r\n\r\n")
    again = mail_sink.Folder(tmp_path)
    assert again.copies == folder.copies == {"<1@example.org>": 2, "<2@example.org>": 1}
    assert again.duplicates == 1
    assert again.add(b"x").name == "00010.eml"
