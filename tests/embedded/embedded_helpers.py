"""What the tests of the embedded server share: user processes, waiting, other users."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from taskd import embedded
from taskd.embedded import data_directory, last_user
from taskd.embedded.data_directory import closed_directory
from taskd.embedded.locks import held

REPO = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "user_process.py"
NOBODY = 65534
FAST = {"durable": False, "linger_s": 0.1}
PRIVATE = ("TASKD_DATA_DIR", "TASKD_PG_BIN", "TASKD_PG_MAJOR", "TASKD_DSN", "XDG_DATA_HOME")


def until(condition, deadline_s=20.0):
    """Wait for what condition() returns to be true; fails the test after deadline_s."""
    end = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
    return found


def processes(word):
    """Return the pids of live processes whose command line contains this word, with that line."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(str(word)) in line:
                found[int(entry.name)] = line
    return found


def watcher_pid(home):
    return only(home, b"last_user.py\0watch\0")


def kill_watcher(home):
    os.kill(watcher_pid(home), signal.SIGKILL)
    until(lambda: not held(home / "watch.lock"))


def kill_postmaster(home):
    os.kill(postmaster_pid(home), signal.SIGKILL)
    until(lambda: last_user.peer_pid(str(home / data_directory.SOCKET)) is None)


def postmaster_pid(home):
    pid = last_user.peer_pid(str(home / data_directory.SOCKET))
    assert pid
    return pid


def only(home, part):
    (pid,) = (p for p, line in processes(home).items() if part in line)
    return pid


def gone(home):
    return not embedded.status(home).running


class User:
    """user_process.py, running."""

    def __init__(self, home, options=FAST, prefix=(), python=sys.executable, **more):
        path = os.pathsep.join([str(REPO), site_packages()])
        env = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        env |= more.pop("env", {})
        self.process = subprocess.Popen(
            [*prefix, python, str(SCRIPT), str(home or ""), json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=env, **more,
        )  # fmt: skip
        self._hello = None

    @property
    def hello(self):
        if self._hello is None:
            self._hello = self.read()
        return self._hello

    def read(self):
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return json.loads(line)

    def ask(self, command):
        assert self.hello
        self.tell(command)
        return self.read()

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue


@functools.cache
def site_packages():
    import asyncpg

    return str(Path(asyncpg.__file__).parents[1])


def python_for(uid):
    """An interpreter that this user can run with the repository's code, or skip."""
    for needed in (SCRIPT, Path(site_packages())):
        if closed_directory(needed, uid, uid):
            pytest.skip(f"user {uid} cannot read {needed}")
    version = f"python3.{sys.version_info.minor}"
    candidates = [sys.executable, *(f"{p}/{version}" for p in ("/usr/bin", "/usr/local/bin"))]
    for path in candidates:
        real = Path(path).resolve()
        if real.exists() and not closed_directory(real, uid, uid):
            return path
    pytest.skip(f"user {uid} can run no {version}")


def as_user(uid):
    """The arguments for User or Popen that change to this user."""
    return {"user": uid, "group": uid, "extra_groups": (), "python": python_for(uid)}


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@functools.cache
def can(*command):
    """Whether this command works here: namespaces and mounts often do not."""
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
