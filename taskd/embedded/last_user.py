"""The watcher: the parent of the postmaster, which it stops shortly after the last user has left.

Run as `python -I -S last_user.py <what> ...`, so that it needs only the standard library and about
9 MB; it must never import taskd. Its output goes to the server's log.

    watch <home> <linger_s> <socket> <watch_fd> <server_fd> <uid> <gid> <postgres> <args>...
    adopt <home> <linger_s> <socket> <watch_fd>      the server's own watcher was killed
    keep  <home> <users_fd> <keep_fd>                a user that stays until the server ends
"""

from __future__ import annotations

import _thread
import fcntl
import os
import signal
import socket
import struct
import sys
import time

QUIET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def peer_pid(path: str, timeout_s: float = 1.0) -> int | None:
    """Ask the kernel who listens on a socket; a pid file could name any process.

    Args:
        path: the unix socket.
        timeout_s: seconds to wait for a server whose backlog is full.

    Returns:
        The pid; 0 if the server is in another pid namespace; None if no process listens.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(path)
        except OSError:
            return None
        if sys.platform == "darwin":
            return peer.getsockopt(0, 2)  # SOL_LOCAL, LOCAL_PEERPID
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("3i", credentials)[0]
        return pid


def leave_the_parent() -> None:
    """Fork away, so that the starter reaps its child at once and never has a zombie of ours."""
    if os.fork():
        os._exit(0)


def run_postgres(server_fd: int, uid: int, gid: int, argv: list[str]) -> None:
    """Become the postmaster, with server.lock inherited and default signals."""
    try:
        for number in (*QUIET, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.set_inheritable(server_fd, True)
        if uid >= 0:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        # LD_* was kept only for this interpreter: postgres finds its libraries by its rpath.
        env = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}
        os.execve(argv[0], argv, env)  # noqa: S606 - this process becomes it
    except OSError as error:
        print(f"FATAL:  cannot execute {argv[0]}: {error.strerror}", flush=True)
    finally:
        os._exit(127)


def exit_with(child: int) -> None:
    """Thread: reap the postmaster and end this process with it."""
    os.waitpid(child, 0)
    os._exit(0)


def exit_when_free(lock: int) -> None:
    """Thread: end this process as soon as no process holds server.lock."""
    fcntl.flock(lock, fcntl.LOCK_SH)
    os._exit(0)


def wait_for_last_user(home: str, linger_s: float) -> None:
    """Return when no process has used the server for linger_s seconds, with start.lock taken."""
    users = os.open(f"{home}/users.lock", os.O_RDWR)
    start = os.open(f"{home}/start.lock", os.O_RDWR)
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)
        fcntl.flock(users, fcntl.LOCK_UN)
        time.sleep(linger_s)
        fcntl.flock(start, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a user joined within the linger time
            fcntl.flock(start, fcntl.LOCK_UN)
        else:
            return


def ignore_signals() -> None:
    """Ignore signals to the group: they must not stop the server while its users still drain."""
    for number in QUIET:
        signal.signal(number, signal.SIG_IGN)


def watch(home: str, linger_s: float, watch_fd: int, server_fd: int, argv: list[str]) -> None:
    """Start the postmaster and stop it after its last user; argv: uid, gid, postgres, arguments."""
    leave_the_parent()
    ignore_signals()
    os.set_inheritable(watch_fd, False)
    child = os.fork()
    if child == 0:
        run_postgres(server_fd, int(argv[0]), int(argv[1]), argv[2:])
    os.close(server_fd)  # never LOCK_UN: that would free the postmaster's lock as well
    _thread.start_new_thread(exit_with, (child,))
    wait_for_last_user(home, linger_s)
    os.kill(child, signal.SIGINT)  # fast shutdown


def adopt(home: str, linger_s: float, path: str) -> None:
    """Do the same for a running server whose watcher is gone."""
    leave_the_parent()
    ignore_signals()
    server = os.open(f"{home}/server.lock", os.O_RDWR)
    _thread.start_new_thread(exit_when_free, (server,))
    wait_for_last_user(home, linger_s)
    pid = peer_pid(path)
    if pid:
        os.kill(pid, signal.SIGINT)
    elif pid == 0:  # in another container: the next user there starts a watcher
        os._exit(0)


def keep(home: str) -> None:
    """Hold users.lock (inherited) until the server ends; SIGTERM ends the holder as well."""
    leave_the_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server = os.open(f"{home}/server.lock", os.O_RDWR)
    exit_when_free(server)


def main(what: str, home: str, *args: str) -> None:
    """Run one of the three."""
    if what == "keep":
        keep(home)
    elif what == "adopt":
        adopt(home, float(args[0]), args[1])
    else:
        watch(home, float(args[0]), int(args[2]), int(args[3]), list(args[4:]))
    while True:  # until a thread ends the process together with the server
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
