"""The watcher stops the server after its last user; the holder keeps the server running.

taskd runs this file as `python -I -S last_user.py <what> ...`. The file imports only the standard
library, and must not import taskd, so that the process needs only about 9 MB. The output of the
process goes to the log of the server.

    watch <home> <linger_s> <socket> <watch_fd> <server_fd> <uid> <gid> <command>...
                                                     start a server and watch its users
    adopt <home> <linger_s> <socket> <watch_fd>      watch a server whose watcher was killed
    keep  <home> <users_fd> <keep_fd>                count as a user until the server ends
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
    """Ask the kernel which process listens on a socket, because a pid file can be stale.

    Args:
        path: the unix socket.
        timeout_s: seconds to wait for a server whose backlog is full.

    Returns:
        The pid; 0 if the server is in another pid namespace; None if no server accepts a
        connection.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(timeout_s)
        try:
            peer.connect(path)
        except OSError:
            return None
        if sys.platform == "linux":
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            pid: int = struct.unpack("3i", credentials)[0]
        elif sys.platform == "darwin":
            pid = peer.getsockopt(0, 2)  # SOL_LOCAL, LOCAL_PEERPID
        else:
            # A server accepts connections, so PostgreSQL has already written the pid of this server
            # into the file.
            with open(f"{path}.lock", encoding="ascii") as file:  # noqa: PTH123
                pid = int(file.readline())
        return pid


def leave_the_parent() -> None:
    """Fork, and let the parent exit, so that the process that ran this program has no child."""
    if os.fork():
        os._exit(0)


def run_postgres(server_fd: int, uid: int, gid: int, argv: list[str]) -> None:
    """Replace this process by the postmaster, which inherits server.lock.

    Args:
        server_fd: the descriptor of server.lock.
        uid, gid: the ids to change to; an id below zero stands for no change.
        argv: the command that starts postgres.
    """
    try:
        for number in (*QUIET, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.set_inheritable(server_fd, True)
        if uid >= 0:
            os.setgroups([])
            os.setgid(gid)
            os.setuid(uid)
        # Only this interpreter needs LD_*. postgres finds its libraries by its rpath.
        env = {k: v for k, v in os.environ.items() if not k.startswith("LD_")}
        os.execve(argv[0], argv, env)  # noqa: S606 - this process becomes the postmaster
    except OSError as error:
        print(f"FATAL:  cannot execute {argv[0]}: {error.strerror}", flush=True)
    finally:
        os._exit(127)


def exit_with(child: int) -> None:
    """Wait until the postmaster ends, reap it, and end this process; called in a thread."""
    os.waitpid(child, 0)
    os._exit(0)


def exit_when_free(lock: int) -> None:
    """End this process as soon as no process holds server.lock."""
    fcntl.flock(lock, fcntl.LOCK_SH)
    os._exit(0)


def wait_for_last_user(home: str, linger_s: float) -> None:
    """Wait for the last user to leave; return if no process uses the server `linger_s` s later.

    On return, this process holds start.lock, so no process can join before the server has stopped.
    """
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
    """Ignore the signals that a service manager sends to all processes of a service.

    After these signals, the users of the server drain. The watcher must outlive the users, to stop
    the server.
    """
    for number in QUIET:
        signal.signal(number, signal.SIG_IGN)


def watch(home: str, linger_s: float, watch_fd: int, server_fd: int, argv: list[str]) -> None:
    """Start the postmaster, and stop it after its last user.

    Args:
        argv: uid, gid, and the command that starts postgres.
    """
    leave_the_parent()
    ignore_signals()
    os.set_inheritable(watch_fd, False)
    child = os.fork()
    if child == 0:
        run_postgres(server_fd, int(argv[0]), int(argv[1]), argv[2:])
    # Close the descriptor without LOCK_UN. LOCK_UN would also release the lock that the postmaster
    # has inherited.
    os.close(server_fd)
    _thread.start_new_thread(exit_with, (child,))
    wait_for_last_user(home, linger_s)
    os.kill(child, signal.SIGINT)  # fast shutdown


def adopt(home: str, linger_s: float, path: str) -> None:
    """Watch a running server whose watcher has ended, and stop it after its last user."""
    leave_the_parent()
    ignore_signals()
    server = os.open(f"{home}/server.lock", os.O_RDWR)
    _thread.start_new_thread(exit_when_free, (server,))
    wait_for_last_user(home, linger_s)
    pid = peer_pid(path)
    if pid:
        os.kill(pid, signal.SIGINT)
    elif pid == 0:  # the server is in another container, where the next user starts a watcher
        os._exit(0)


def keep(home: str) -> None:
    """Hold the inherited users.lock until the server has ended, or a SIGTERM ends this process."""
    leave_the_parent()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server = os.open(f"{home}/server.lock", os.O_RDWR)
    exit_when_free(server)


def main(what: str, home: str, *args: str) -> None:
    """Run watch(), adopt() or keep()."""
    if what == "keep":
        keep(home)
    elif what == "adopt":
        adopt(home, float(args[0]), args[1])
    else:
        watch(home, float(args[0]), int(args[2]), int(args[3]), list(args[4:]))
    while True:  # a thread ends this process when the server has ended
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
