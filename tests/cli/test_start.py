"""The start of `taskd run`: the import of the app, and signals before the worker is ready."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

from taskd import Client, events
from taskd.core.tasks import registry
from taskd.core.tasks.task import Task
from taskd.errors import AppError
from taskd.worker.starting import app_import

ROOT = Path(__file__).parents[2]
WITHIN_S = 30.0
TASK = """
from taskd import task

@task
async def works() -> None: ...
"""


def write(name, text):
    Path(name).write_text(textwrap.dedent(text))


def appeared(name):
    deadline = time.monotonic() + WITHIN_S
    while not Path(name).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def at_rest(process):
    """Wait until the main thread sleeps.

    A dump of the stacks that interrupts a running interpreter can crash it: CPython 3.11 did so
    once in 55,000 dumps during imports, and more often while a module begins.
    """
    stat = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
    before = None
    while before != (now := stat.read_text().rpartition(")")[2].split()[11:13]):
        before = now
        time.sleep(0.05)


def until(process, word):
    """Read stderr up to a line with this word."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if word in line:
            return line
    raise AssertionError("".join(lines))


@pytest.fixture
def runs(process, taskd):
    """Starts `taskd run` with an app of this text."""

    def start(text, *args, app="app"):
        write("app.py", text)
        return process("run", "--app", app, "--log-format", "json", *args, dsn=taskd.dsn)

    return start


def refused(process):
    """What a `taskd run` writes that ends with a wrong configuration."""
    _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 78, said
    return said


# The import.


def test_the_import_can_run_a_loop_of_its_own_and_enqueue(taskd, runs):
    process = runs(
        TASK
        + """
import asyncio
asyncio.run(asyncio.sleep(0))
works.enqueue_sync()
""",
        "--until-empty",
    )
    said = until(process, "job.done")
    assert json.loads(said)["task"] == "works"
    assert process.wait(WITHIN_S) == 0


@pytest.mark.parametrize("code", ["", "0", "'no licence'"])
def test_an_exit_at_import_names_its_line_and_is_no_success(runs, code):
    said = refused(runs(f"import sys\n\ndef main():\n    sys.exit({code})\n\nmain()\n"))
    assert f"app 'app' called sys.exit({code}) while it was imported" in said
    assert f"({Path('app.py').resolve()}:6)" in said
    assert 'below `if __name__ == "__main__":`' in said


def test_a_program_that_reads_its_arguments_is_named_and_not_the_library(runs):
    said = refused(runs("import argparse\nargparse.ArgumentParser().parse_args()\n"))
    assert "called sys.exit(2)" in said
    assert f"({Path('app.py').resolve()}:2)" in said


def test_an_error_deep_in_the_app_shows_its_traceback_and_its_cause(runs):
    Path("shop").mkdir()
    write("shop/__init__.py", "")
    write("shop/jobs.py", "from shop import config\n")
    write(
        "shop/config.py",
        """
        def read():
            try:
                return {}["DATABASE"]
            except KeyError as error:
                raise ValueError("no database") from error
        read()
        """,
    )
    said = refused(runs("", app="shop"))
    assert "KeyError: 'DATABASE'" in said
    assert 'config.py", line 6, in read' in said
    assert "app 'shop.config' cannot be imported: ValueError: no database" in said
    assert "importlib" not in said
    assert "app_import.py" not in said


def test_a_mistyped_app_needs_no_traceback(runs):
    said = refused(runs("", app="appp"))
    assert "Traceback" not in said
    assert "looked in" in said


def test_an_import_that_hangs_is_told_with_its_line(home, monkeypatch):
    told = []
    monkeypatch.setattr(app_import, "SLOW_S", 0.01)
    monkeypatch.setattr(registry, "DEFAULT", registry.Registry())
    monkeypatch.chdir(home)
    write("hangs.py", "import waits\nwaits.until_told()\n")
    monkeypatch.setitem(sys.modules, "waits", sys.modules[__name__])
    monkeypatch.setattr(
        sys.modules[__name__], "until_told", lambda: _wait_for(lambda: told), raising=False
    )
    end = events.subscribe(lambda name, fields: told.append((name, fields)))
    try:
        with pytest.raises(AppError, match="registers no task"):
            app_import.load_app("hangs")
    finally:
        end()
        sys.path.remove(str(home))
        sys.modules.pop("hangs", None)
    name, fields = told[0]
    assert (name, fields["app"]) == ("app.import_slow", "hangs")
    assert fields["at"] == f"{home / 'hangs.py'}:2"


def _wait_for(condition):
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stderr_without_a_file_harms_nothing(taskd, runs):
    process = runs(
        TASK
        + """
import sys
class Written:
    def write(self, text): ...
sys.stderr = sys.stdout = Written()
"""
    )
    until(process, "worker.ready")
    process.send_signal(signal.SIGUSR2)
    until(process, "most recent call first")
    process.send_signal(signal.SIGHUP)
    until(process, "worker.reloaded")
    process.send_signal(signal.SIGQUIT)
    until(process, "most recent call first")
    until(process, "worker.stopped")
    assert process.wait(WITHIN_S) == 0


# Signals before the worker is ready. Each app says where it is.

SLEEPS = "import time\nopen('there', 'w').close()\nwhile True:\n    time.sleep(0.05)\n"
SWALLOWS = """
import time
open('there', 'w').close()
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass
"""
COMPUTES = """
import hashlib
open('there', 'w').close()
hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000_000)
"""
KEEPS_A_THREAD = (
    "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
)


@pytest.mark.parametrize("app", [SLEEPS, SWALLOWS, COMPUTES, KEEPS_A_THREAD + SLEEPS])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGQUIT, 0), (signal.SIGINT, 130)]
)
def test_a_stop_ends_an_import(runs, app, number, code):
    process = runs(app)
    appeared("there")
    process.send_signal(number)
    assert process.wait(WITHIN_S) == code


def test_signals_that_are_no_stop_leave_an_import_alone(runs):
    process = runs(SLEEPS)
    appeared("there")
    process.send_signal(signal.SIGHUP)
    at_rest(process)
    process.send_signal(signal.SIGUSR2)
    assert "most recent call first" in until(process, "most recent call first")
    assert "app.py" in until(process, "app.py")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM stopped the worker before it had claimed a job" in until(process, "stopped")
    assert process.wait(WITHIN_S) == 0


def test_processes_that_the_import_forks_are_ended_by_signals(runs):
    process = runs(
        """
        import os, signal, time
        child = os.fork()
        if not child:
            open('there', 'w').close()
            time.sleep(600)
            os._exit(0)
        while not os.path.exists('there'):
            time.sleep(0.01)
        os.kill(child, signal.SIGTERM)
        raise RuntimeError(f"it ended with {os.waitpid(child, 0)[1]}")
        """
    )
    assert f"RuntimeError: it ended with {int(signal.SIGTERM)}" in refused(process)


def test_ctrl_c_ends_an_import(runs):
    process = runs(SLEEPS)
    appeared("there")
    process.send_signal(signal.SIGINT)
    assert process.wait(WITHIN_S) == 130


def test_a_stop_ends_several_processes_that_import(runs):
    process = runs(SLEEPS, "--processes", "2")
    appeared("there")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WITHIN_S) == 0


# The app changes what runs after its import, so that the stop arrives at exactly this place.
STOP = "import os, signal\ndef stop(): os.kill(os.getpid(), signal.SIGTERM)\n"
BEFORE_THE_LOOP = """
from taskd.cli.run import command
before = command._to_its_end
def stopped(*args):
    stop()
    return before(*args)
command._to_its_end = stopped
"""
WITHOUT_A_STEP = """
import uvloop
before = uvloop.Loop.run_until_complete
def stopped(loop, main):
    loop.call_soon(stop)
    return before(loop, main)
uvloop.Loop.run_until_complete = stopped
"""
BEFORE_THE_WORKER = """
import asyncio, taskd.client
async def stopped(settings):
    stop()
    await asyncio.sleep(600)
taskd.client.open_target = stopped
"""
IN_THE_FIRST_CHECK = """
import asyncio
from taskd.worker import worker
async def stopped(connects, stop_requested):
    stop()
    await asyncio.sleep(600)
worker.when_connections_are_free = stopped
"""


@pytest.mark.parametrize(
    "place", [BEFORE_THE_LOOP, WITHOUT_A_STEP, BEFORE_THE_WORKER, IN_THE_FIRST_CHECK]
)
def test_a_stop_between_import_and_worker_ends_the_process(runs, place):
    process = runs(TASK + STOP + place)
    _, said = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, said
    assert "SIGTERM stopped the worker before it had claimed a job" in said
    assert "Traceback" not in said


def test_a_stop_right_after_the_fork_of_a_reload_waits_for_the_handlers(taskd, home):
    write("app.py", TASK)
    program = """
        import os, signal, sys
        from taskd.cli import main
        from taskd.cli.run import command

        class Early(command.EarlySignals):
            def install(self):
                os.kill(os.getpid(), signal.SIGTERM)  # as the parent would, before the handlers
                super().install()

        command.EarlySignals = Early
        sys.argv = ["taskd", "run", "--app", "app", "--reload"]
        main()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"TASKD_DSN": taskd.dsn, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            until(started, "SIGTERM stopped the worker")
            until(started, "the worker has ended (exit code 0)")
        finally:
            started.terminate()
        assert started.wait(WITHIN_S) == 0


# gevent and eventlet.


@pytest.mark.parametrize(
    ("library", "patch"),
    [
        ("gevent", "from gevent import monkey\nmonkey.patch_all()\n"),
        ("gevent", "from gevent import monkey\nmonkey.patch_all(thread=False)\n"),
        ("eventlet", "import eventlet\neventlet.monkey_patch()\n"),
    ],
)
def test_a_monkey_patched_app_is_refused(runs, library, patch):
    said = refused(runs(patch + TASK))
    assert f"has let {library} replace Python's threads or sockets" in said
    assert "Traceback" not in said


async def works_in_greenlets() -> None: ...


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_greenlet_that_enqueues_is_told_the_way_out(monkeypatch, library):
    module = {"gevent": "gevent.monkey", "eventlet": "eventlet.patcher"}[library]
    patched = {"threading", "thread"}
    monkeypatch.setitem(
        sys.modules,
        module,
        types.SimpleNamespace(
            is_module_patched=patched.__contains__, is_monkey_patched=patched.__contains__
        ),
    )
    task = Task(works_in_greenlets)
    with pytest.raises(RuntimeError, match=f"{library} has replaced.*Enqueue over your own"):
        Client(dsn="postgresql://127.0.0.1/x").enqueue_many_sync([task.job()])
