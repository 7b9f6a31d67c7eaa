"""A guard process between a worker and a command: no process of the command outlives its attempt.

    python -I -S subprocess_guard.py WORKER_PIPE GRACE_S ARGV...

WORKER_PIPE is the reading end of a pipe. The worker keeps the other end open while the command is
allowed to run. When the worker closes its end or is killed, the guard sends SIGTERM to the
command's process group and, GRACE_S later, SIGKILL. When the command has ended, the guard kills all
processes that the command has left, even in other process groups. The guard is a subreaper, so
these processes are its children now. The guard then ends like the command, with the same exit code
or signal. This file imports nothing of taskd.

Only Linux has subreapers and parent-death signals. On other systems, processes that have left the
process group of the command are not killed. If the guard itself is killed there, the command
continues to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
NOT_FOUND, NOT_EXECUTABLE = 127, 126
STRAYS_S = 2.0
_prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", lambda *_: None)


def start(argv: list[str], signal_pipe: int) -> int:
    """Start the command in a process group of its own; return its pid."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.close(signal_pipe)
        # Python ignores these signals, and the command would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)  # noqa: S606
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode(errors="replace"))
    os._exit(NOT_FOUND if not os.path.exists(argv[0]) else NOT_EXECUTABLE)  # noqa: PTH110


def kill(pid: int, number: int) -> None:
    """Send a signal to the command's process group, if it exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def reap(pid: int) -> int | None:
    """Reap children that have ended; return the status of the command, if it was among them."""
    status = None
    while True:
        try:
            found, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if not found:
            return status
        if found == pid:
            status = how


def wait_for(pid: int, worker_pipe: int, signals_read: int, grace_s: float) -> int:
    """Wait until the command has ended; return its status.

    If `worker_pipe` closes or SIGTERM arrives, end the command.
    """
    watched = [worker_pipe, signals_read]
    kill_at: float | None = None
    while True:
        left_s = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        ready, _, _ = select.select(watched, [], [], left_s)
        signals = os.read(signals_read, 512) if signals_read in ready else b""
        status = reap(pid)
        if status is not None:
            return status
        if worker_pipe in ready:
            watched.remove(worker_pipe)
        if kill_at is None and (worker_pipe in ready or signal.SIGTERM in signals):
            kill(pid, signal.SIGTERM)
            kill_at = time.monotonic() + grace_s
        elif kill_at is not None and time.monotonic() >= kill_at:
            kill(pid, signal.SIGKILL)
            kill_at = time.monotonic() + STRAYS_S


def kill_strays(pid: int) -> None:
    """Kill the processes that the command has left, even outside its process group."""
    kill(pid, signal.SIGKILL)
    ends = time.monotonic() + STRAYS_S
    while time.monotonic() < ends:
        reap(pid)
        try:
            with open("/proc/thread-self/children", encoding="ascii") as file:  # noqa: PTH123
                strays = file.read().split()
        except OSError:
            return
        if not strays:
            return
        for stray in strays:
            try:
                os.kill(int(stray), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def end_as(status: int) -> None:
    """End this process like the command: with its exit code, or by its signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def main() -> None:
    """Guard one command."""
    worker_pipe, grace_s, argv = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(worker_pipe, False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals_read, signal_pipe = os.pipe()
    os.set_blocking(signal_pipe, False)
    signal.set_wakeup_fd(signal_pipe, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # a handler, and not SIG_IGN, which is inherited
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    pid = start(argv, signal_pipe)
    # Leave stdin, stdout and stderr to the command: a worker that writes to an ended command must
    # get an error.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    status = wait_for(pid, worker_pipe, signals_read, grace_s)
    kill_strays(pid)
    end_as(status)


if __name__ == "__main__":
    main()
