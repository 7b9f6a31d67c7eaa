"""`taskd top`, on a terminal: what a person sees stands in the cells of the screen."""

from __future__ import annotations

import json
import re
import signal

import pytest

from taskd.cli.shared.output import cell
from taskd.cli.shared.terminal import cells, cut, fit, keys, painted
from taskd.cli.top.screen import Ui, screen
from taskd.core.watching.top import Queue, View
from tests.cli.screens import Tty

# It would clear the screen, name the window, and go on with another line.
LOOKS = re.compile(r"\x1b\[[\d;]*m")
COLOURS = re.compile(rb"\x1b\[3\d[\d;]*m")
HOSTILE = "boom \x1b[2J\x1b]0;owned\x07 \u202e \x9b31m\nsecond line"


@pytest.fixture
def tty(dsn, home):
    opened = []

    def start(*args, columns=80, lines=24, **env):
        opened.append(Tty(args, dsn, columns, lines, cwd=home, **env))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


@pytest.fixture
def busy(taskd):
    """Two queues, a worker, one job that runs, and one that has failed."""
    taskd.worker(7, "email", "web")
    for _ in range(3):
        taskd.enqueue("send_report", "--queue", "email")
    running = taskd.enqueue("render", "--queue", "email")
    taskd.sql(
        "UPDATE taskd.job SET state = 'running', worker_id = 7, attempt = 1, fence = 1, "
        "started_at = now() - interval '1 h' WHERE id = $1",
        running,
    )
    taskd.sql(
        "INSERT INTO taskd.progress (job_id, fence, done, total, note) VALUES ($1, 1, 1, 4, $2)",
        running,
        "half" + HOSTILE,
    )
    taskd.finish(taskd.enqueue("send_report", "--queue", "web"), "failed", reason=HOSTILE)
    return taskd


def asked(taskd, top):
    """Wait until it has polled the database again, and drawn the result."""
    latest = (
        "SELECT max(query_start) FROM pg_stat_activity "
        "WHERE application_name = 'taskd top' AND datname = current_database()"
    )
    before = taskd.sql(latest)
    while taskd.sql(latest) == before:
        top.read()
    while top.read(0.2):
        pass


def test_a_person_sees_what_goes_on_and_leaves_the_terminal_as_it_was(busy, tty):
    top = tty("top", "--interval", "500ms")
    top.until("every 500ms", "render", "answered in", "in 0/s")
    assert top.row("email")[:3] == ["email", "3", "1"]
    assert top.row("host1:4242")[:3] == ["host1:4242", "live", "1"]
    assert top.line(" render ").split()[:2] == ["1h", "4"]
    assert "25% half" in top.line(" render ")
    assert top.row("send_report")[1:3] == ["0", "1"]
    assert top.line("1 failed")
    # Text of other people stays text, and in its line.
    assert "boom \\x1b[2J" in top.text
    assert not top.screen.titles
    assert b"\x1b[2J\x1b]" not in top.written
    # Changes become visible.
    busy.enqueue("send_report", "--queue", "web")
    top.until("4 queued")
    # A held screen does not change, and shows that it is held.
    top.press(" ")
    top.until("held")
    busy.enqueue("send_report", "--queue", "web")
    for _ in range(2):
        asked(busy, top)
    assert "4 queued" in top.text
    top.press(" ")
    top.until("5 queued", gone=["held"])
    # One queue alone, the help, and back.
    top.press("sss")
    top.until("sort: name")
    top.press("\x1b[Bj\r")
    top.until("queue web", "2 queued", gone=["email  "])
    top.press("h")
    top.until("show only the chosen queue", gone=["RUNNING FOR"])
    top.resize(90, 24)
    top.until("show only the chosen queue", gone=["RUNNING FOR"])
    top.resize(80, 24)
    top.press("h\x1b")
    top.until("5 queued", "RUNNING FOR", gone=["queue web"])
    # Wider and taller, then hardly anything.
    assert "SCHEDULED" not in top.text
    top.resize(160, 50)
    top.until("SCHEDULED", "BLOCKED")
    while not top.screen.display[49].startswith(" q quit"):
        assert top.read(10)
    top.resize(20, 3)
    top.until("taskd top", gone=["SCHEDULED"])
    top.press("q")
    assert top.end() == 0
    assert top.is_left_as_it_was


def test_it_stops_and_comes_back_and_ends_at_ctrl_c(taskd, tty):
    top = tty("top", NO_COLOR="1")
    top.until("no queue: no job waits", "no live worker", "nothing runs")
    assert not COLOURS.search(top.written)
    top.press("\x1a")  # Ctrl-Z
    top.until("the shell is back")
    assert top.is_left_as_it_was
    top.send(signal.SIGCONT)
    top.until("no queue: no job waits")
    assert top.screen.alternate
    top.press("\x03")
    assert top.end() == 0
    assert top.is_left_as_it_was


def test_it_outlives_an_outage_and_ends_at_sigterm(busy, tty, server):
    [[name]] = busy.sql("SELECT current_database()")
    top = tty("top", "--interval", "200ms")
    top.until("answered in", "3 queued")
    server.admin(
        f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false',
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",
    )
    top.until("NO DATABASE for", "3 queued")
    server.admin(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    top.until("answered in", gone=["NO DATABASE"])
    top.send(signal.SIGTERM)
    assert top.end() == 0
    assert top.is_left_as_it_was


def test_an_error_that_nobody_expects_is_reported_on_the_terminal_as_it_was(busy, tty):
    top = tty("top", "--interval", "200ms")
    top.until("3 queued")
    busy.sql("DROP SCHEMA taskd CASCADE")
    assert top.end() == 78
    assert "this database has no schema taskd" in top.text
    assert top.is_left_as_it_was


def test_a_reader_who_may_only_watch_may_watch(busy, logins):
    reader = type(busy)(logins.dsn("observer"))
    [seen] = reader.json("top", "--once")
    assert {each["queue"] for each in seen["queues"]} == {"email", "web"}


def test_off_a_terminal_it_is_one_screen_or_json(busy):
    shown = busy("top", "--once").stdout
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert lines["email"].split()[:3] == ["email", "3", "1"]
    assert shown.isascii() or "…" in shown
    assert "\x1b" not in shown
    one = busy("top", "--once", "--queue", "email").stdout.splitlines()
    assert any(line.startswith("email ") for line in one)
    assert not any(line.startswith("web ") for line in one)
    [seen] = busy.json("top", "--once")
    assert seen["in_per_s"] == 0
    assert {each["queue"]: each["queued"] for each in seen["queues"]} == {"email": 3, "web": 0}
    assert "use --once or --json" in busy("top", code=2).stderr
    assert "0.2" in busy("top", "--interval", "10ms", code=2).stderr


def test_json_comes_once_per_interval_until_ctrl_c(busy, process):
    top = process("top", "--json", "--interval", "300ms", dsn=busy.dsn)
    first, second = (json.loads(top.stdout.readline()) for _ in range(2))
    assert first["now_s"] < second["now_s"]
    top.send_signal(signal.SIGINT)
    assert top.wait(30) == 0
    assert top.stderr.read() == ""


def test_a_wrong_database_ends_it_at_once(nowhere):
    assert (
        "cannot be reached"
        in nowhere("top", "--once", code=69, TASKD_DSN="postgresql://nobody@127.0.0.1:9/x").stderr
    )


# The parts.


def test_texts_take_the_cells_that_a_terminal_gives_them():
    assert (cells("日本"), cells("e\u0301"), cells("abc")) == (4, 1, 3)
    assert (fit("日本語", 4), cells(fit("日本語", 4))) == ("日… ", 4)
    assert (fit("ab", 4, right=True), fit("abcdef", 4), fit("abc", 0)) == ("  ab", "abc…", "")
    assert cut("日本", 3) == "日"
    assert painted([("abc", "bad"), ("def", "")], 5, colours=False) == "abcde"
    assert painted([("ab", "bad")], 3, colours=True) == "\x1b[31;1mab\x1b[0m "


def test_keys_are_known_by_their_sequences_and_others_are_left_out():
    assert list(keys("q\x1b[A\x1bOB\r\x1b[5~")) == ["q", "up", "down", "enter"]
    assert list(keys(" \x1b[1;5Cé\x00")) == ["space", "é"]
    assert list(keys("\x1b")) == ["escape"]
    assert list(keys("\x1b[")) == []


def queue(name, **values):
    given = {
        "queued": 0,
        "scheduled": 0,
        "retrying": 0,
        "blocked": 0,
        "running": 0,
        "oldest_due_s": None,
    }
    given |= {"workers": 1, "paused": False, "pause_reason": None, "polled": False}
    return Queue(queue=name, **given | {"max_running": None} | values)


@pytest.mark.parametrize("width", [1, 10, 40, 80, 160])
@pytest.mark.parametrize("height", [1, 3, 8, 24, 50])
def test_every_size_has_a_screen(width, height):
    queues = [queue(f"q{n}", queued=10**9, oldest_due_s=10.0**n) for n in range(60)]
    view = View(0.0, queues, [], [], [], [], 1.0, 2.0)
    for ui in (Ui(2.0), Ui(2.0, chosen="q0"), Ui(2.0, help=True)):
        lines = screen(view, ui, width, height)
        assert len(lines) == height
        shown = [LOOKS.sub("", painted(line, width, colours=True)) for line in lines]
        assert [cells(each) for each in shown] == [width] * height
    if height >= 8 and width >= 10:
        chosen = screen(view, Ui(2.0, chosen="q0"), width, height)
        assert any(text.startswith("q0") for line in chosen for text, _ in line)


def test_what_is_odd_about_a_queue_is_reported():
    view = View(
        0.0,
        [
            queue("a", paused=True, pause_reason="provider\nis down"),
            queue("b", queued=1, workers=0),
            queue("c", running=4, max_running=4),
            queue("d", polled=True),
        ],
        *([], [], [], [], None, None),
    )
    text = "\n".join("".join(part for part, _ in line) for line in screen(view, Ui(2.0), 160, 24))
    for said in ("paused: provider is down", "NO WORKER", "full: 4 of 4", "polled"):
        assert said in text


def test_a_cell_never_steers_the_terminal():
    assert cell(HOSTILE).isprintable()
