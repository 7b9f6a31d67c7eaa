"""`taskd run --reload`: a change of the code drains the worker and starts another one."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from taskd.cli.run import reload
from taskd.errors import ConfigError

WITHIN_S = 30.0
APP = """
import asyncio
from pathlib import Path
from taskd import task

@task
async def say() -> str:
    return "{word}"

@task
async def wait() -> str:
    Path("begun").touch()
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    return "{word}"
"""


class Watcher:
    """A `taskd run --reload`, and its output."""

    def __init__(self, process):
        self.process, self.said = process, []

    def until(self, *words):
        """Read its output up to a line that contains all of these words."""
        too_late = threading.Timer(2 * WITHIN_S, self.give_up)
        too_late.start()
        try:
            for line in self.process.stderr:
                self.said.append(line)
                if all(word in line for word in words):
                    return line
                assert "has ended" not in line, self.said
        finally:
            too_late.cancel()
        raise AssertionError(f"it ended with {self.process.wait()}: {''.join(self.said)}")

    def give_up(self):
        """Print where the worker stands, and end both:

        the message of a failure then has all output.
        """
        pid = self.process.pid
        workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.said.append(f"nothing more came from {pid} and its workers {workers}\n")
        self.process.send_signal(signal.SIGUSR2)  # which it passes on
        time.sleep(1.0)
        for each in (*map(int, workers), pid):
            os.kill(each, signal.SIGKILL)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(WITHIN_S)


def write(word, text=APP):
    """In one step: a file that is seen empty and then full has changed twice."""
    Path("shop.new").write_text(text.format(word=word))
    Path("shop.new").replace("shop.py")


@pytest.fixture
def watch(taskd, process):
    def start():
        args = ("run", "--app", "shop", "--reload", "--log-format", "json")
        return Watcher(process(*args, dsn=taskd.dsn))

    write("one")
    return start


def done(taskd, job_id):
    """Wait until a job is done; its result and the number of its attempt."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        query = "SELECT state, result, attempt FROM taskd.jobs WHERE id = $1"
        (row,) = taskd.sql(query, job_id)
        if row["state"] == "done":
            return json.loads(row["result"]), row["attempt"]
        time.sleep(0.02)
    raise AssertionError(dict(row))


def appeared(name):
    deadline = time.monotonic() + WITHIN_S
    while not Path(name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_change_drains_the_worker_and_starts_one_with_the_new_code(taskd, watch):
    watcher = watch()
    watcher.until("worker.ready")
    assert done(taskd, taskd.enqueue("say")) == ("one", 1)
    running = taskd.enqueue("wait")
    appeared("begun")
    write("two")
    watcher.until("shop.py has changed")
    watcher.until("worker.draining")
    Path("go").touch()
    watcher.until("worker.ready")
    assert done(taskd, running) == ("one", 1)
    assert done(taskd, taskd.enqueue("say")) == ("two", 1)
    assert watcher.stop() == 0


def test_a_syntax_error_is_shown_and_the_next_change_is_waited_for(taskd, watch):
    watcher = watch()
    watcher.until("worker.ready")
    write("two", APP + "\nthis is no Python\n")
    assert "SyntaxError" in watcher.until("cannot be imported")
    assert "(exit code 78); the next worker starts after a change" in watcher.until("has ended")
    write("three")
    watcher.until("worker.ready")
    assert done(taskd, taskd.enqueue("say")) == ("three", 1)
    write("four", "this is no Python either")
    watcher.until("has ended")
    assert watcher.stop(signal.SIGINT) == 0


def test_ctrl_c_in_a_terminal_drains_once(taskd, watch):
    master, terminal = pty.openpty()
    command = (sys.executable, "-m", "taskd", "run", "--app", "shop", "--reload")
    with subprocess.Popen(
        ["setsid", "--ctty", *command, "--log-format", "json"],
        env=os.environ | {"TASKD_DSN": taskd.dsn, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=terminal,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            watcher = Watcher(started)
            watcher.until("worker.ready")
            running = taskd.enqueue("wait")
            appeared("begun")
            os.write(master, b"\x03")
            watcher.until("worker.draining")
            Path("go").touch()
            assert json.loads(watcher.until("worker.stopped"))["jobs"].get("interrupted", 0) == 0
            assert started.wait(WITHIN_S) == 0
            assert done(taskd, running) == ("one", 1)
        finally:
            started.kill()
            os.close(master)
            os.close(terminal)


def test_the_worker_ends_after_a_watcher_that_was_killed(taskd, watch):
    watcher = watch()
    watcher.until("worker.ready")
    watcher.process.kill()
    watcher.until("worker.draining")
    watcher.until("worker.stopped")


def test_a_reload_of_the_settings_reaches_the_worker(taskd, watch):
    watcher = watch()
    watcher.until("worker.ready")
    watcher.process.send_signal(signal.SIGHUP)
    watcher.until("worker.reloaded")
    assert watcher.stop() == 0


@pytest.mark.parametrize("more", [["--until-empty"], ["--processes", "2"]])
def test_it_goes_with_one_process_that_stays(taskd, more):
    assert "--reload works only with one process" in taskd("run", "--reload", *more, code=2).stderr


def test_the_environment_cannot_ask_for_more_processes_either(taskd):
    taskd("run", "--reload", code=2, TASKD_PROCESSES="3")


# The watched files.


def test_other_peoples_code_is_not_checked(home):
    for name in ("a.py", "b/c.py", ".git/d.py", "node_modules/e.py", "b/__pycache__/f.py", "g.txt"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    (home / "env/lib").mkdir(parents=True)
    (home / "env/pyvenv.cfg").touch()
    (home / "env/lib/h.py").touch()
    (home / "i.py").symlink_to("nothing")
    assert {os.path.relpath(path) for path in reload.scan([home])} == {"a.py", "b/c.py"}


def test_a_file_that_is_new_gone_or_written_to_is_a_change(home):
    (home / "a.py").touch()
    before = reload.scan([home])
    assert reload._changed(before, reload.scan([home])) is None
    (home / "b.py").touch()
    assert reload._changed(before, reload.scan([home])) == "b.py"
    (home / "b.py").unlink()
    os.utime(home / "a.py", ns=(1, 1))
    assert reload._changed(before, reload.scan([home])) == "a.py"
    (home / "a.py").unlink()
    assert reload._changed(before, {}) == "a.py"


def test_an_app_that_lives_elsewhere_is_checked_too(home):
    assert reload.watched(None) == [home]
    assert reload.watched("nothing_of_the_kind.at_all") == [home]
    assert reload.watched("json.decoder") == [home, Path(json.__file__).parent]


def test_a_folder_that_is_no_project_is_refused(home, monkeypatch):
    monkeypatch.setattr(reload, "ENTRIES_MAX", 1)
    for name in ("a.py", "b.py"):
        (home / name).touch()
    with pytest.raises(ConfigError, match="in the folder of your project"):
        reload.scan([home])


def test_sighup_takes_a_changed_list_of_queues(taskd, process):
    write("one")
    Path("taskd.toml").write_text('queues = ["default", "gone"]\n')
    args = ("run", "--app", "shop", "--log-format", "json")
    watcher = Watcher(process(*args, dsn=taskd.dsn))
    watcher.until("worker.ready")
    job = taskd.enqueue("say", "--queue", "other")
    Path("taskd.toml").write_text('queues = ["default", "other:3"]\n')
    watcher.process.send_signal(signal.SIGHUP)
    changed = json.loads(watcher.until("queues.changed"))
    assert (changed["served"], changed["left"]) == (["other"], ["gone"])
    assert done(taskd, job) == ("one", 1)
    Path("taskd.toml").write_text('queues = ["default;other"]\n')
    watcher.process.send_signal(signal.SIGHUP)
    assert "taskd.toml (queues): 'default;other' is not a queue" in watcher.until("service.crashed")
    assert watcher.stop() == 0
