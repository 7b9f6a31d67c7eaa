"""Containers without an engine: an image's root and config, run in namespaces of the kernel.

A container here has its own mounts, processes, IPC and host name, a read-only root, an unprivileged
user that can gain nothing, and its command as process 1. The mounts end with its processes. What an
engine adds (network, cgroups, seccomp) is not there.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import asyncpg

from tests.system.dockerfile import CHECKOUT, Config
from tests.system.shell import Proxy

WITHIN_S = 30.0
HOST = "c0ffee"
# The container ends with its parent, however that ends.
DIES_WITH_PARENT = ("setpriv", "--pdeathsig=KILL")
NAMESPACES = (
    *DIES_WITH_PARENT,
    *("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child"),
)
UNPRIVILEGED = ("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
# Mounts, then the command. The death of unshare kills process 1, and with it everything; a change
# of user would undo that, so setpriv says it again afterwards.
SETUP = """
set -e
root=$1 access=$2; shift 2
echo "$HOST_NAME" > /proc/sys/kernel/hostname
mount --bind "$root" "$root"
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for each in null zero full random urandom; do
    : > "$root/dev/$each"
    mount --bind "/dev/$each" "$root/dev/$each"
done
mkdir -m 1777 "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
while [ "$1" != -- ]; do mount --bind -o ro "$1" "$root$2"; shift 2; done
shift
[ "$access" = rw ] || mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --pdeathsig=KILL "$@"
"""


class Ended(NamedTuple):
    """What a command in a container came to."""

    code: int
    out: str
    err: str


class Bind(NamedTuple):
    """A file or directory of this machine, read-only in the container."""

    here: Path
    there: str


@dataclass(frozen=True, slots=True)
class Image:
    """A directory to be the root, and the config.

    Attributes:
        binds: what every container of the image sees as well.
    """

    root: Path
    config: Config
    binds: tuple[Bind, ...] = ()

    def command(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        binds: Sequence[Bind] = (),
        writable: bool = False,
    ) -> list[str]:
        """The command of this machine that runs `argv` as process 1 of a new container."""
        mounts = []
        for bind in (*self.binds, *binds):
            _make_place(self.root, bind)
            mounts += [str(bind.here), bind.there]
        uid, _, gid = self.config.user.partition(":")
        return [
            *NAMESPACES, "sh", "-c", SETUP, "sh", str(self.root), "rw" if writable else "ro",
            *mounts, "--", f"--reuid={uid}", f"--regid={gid}", "--clear-groups",
            *(() if uid == "0" else UNPRIVILEGED), *self.inside(argv, environ or {}),
        ]  # fmt: skip

    def inside(self, argv: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """The command inside the container, with the image's environment and directory."""
        merged = {"HOME": _home(self.root, self.config.user), "HOSTNAME": HOST}
        merged |= self.config.env | environ
        directory = self.config.directory
        return ["env", "-i", "-C", directory, *(f"{k}={v}" for k, v in merged.items()), *argv]

    async def start(self, argv: Sequence[str] = (), **options: Any) -> Container:
        """A container of the image; without `argv` it runs the image's own command."""
        config = self.config
        process = await asyncio.create_subprocess_exec(
            *self.command([*config.entrypoint, *(argv or config.cmd)], **options),
            env=os.environ | {"HOST_NAME": HOST},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return Container(self, process, options.get("environ") or {})

    async def run(self, *argv: str, **options: Any) -> Ended:
        """Run a container to its end."""
        container = await self.start(argv, **options)
        try:
            return await container.ended()
        finally:
            await container.kill()


class Container:
    """A running container."""

    def __init__(
        self, image: Image, process: asyncio.subprocess.Process, environ: Mapping[str, str]
    ) -> None:
        self.image, self.process, self.environ = image, process, environ
        self.lines: list[dict[str, Any]] = []
        self._text = ["", ""]
        self._changed = asyncio.Condition()
        pipes = (process.stdout, process.stderr)
        self._readers = [asyncio.create_task(self._read(n, p)) for n, p in enumerate(pipes)]

    async def _read(self, number: int, pipe: asyncio.StreamReader | None) -> None:
        assert pipe
        async for line in pipe:
            self._text[number] += line.decode()
            with suppress(ValueError):
                said = json.loads(line)
                async with self._changed:
                    self.lines.append(said)
                    self._changed.notify_all()
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for a log line of this event, and return the first one."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines if line.get("event") == event]

        with suppress(TimeoutError):
            async with asyncio.timeout(WITHIN_S), self._changed:
                await self._changed.wait_for(lambda: found() or self.process.returncode is not None)
        assert found(), self._text
        return found()[0]

    @property
    def pid(self) -> int:
        """Process 1 of the container, as this machine numbers it."""
        own = self.process.pid
        return int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[0])

    async def exec(self, *argv: str) -> Ended:
        """Run a command beside process 1, as `docker exec` and health checks do."""
        uid, _, gid = self.image.config.user.partition(":")
        process = await asyncio.create_subprocess_exec(
            "nsenter", "--target", str(self.pid), "--mount", "--pid", "--uts", "--ipc", "--root",
            "--setuid", uid, "--setgid", gid, "--", *self.image.inside(argv, self.environ),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), WITHIN_S)
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())

    async def health(self) -> Ended:
        """Run the image's HEALTHCHECK."""
        return await self.exec(*self.image.config.health)

    def stop(self) -> None:
        """Send process 1 what `docker stop` sends."""
        os.kill(self.pid, signal.Signals[self.image.config.stop_signal])

    async def ended(self) -> Ended:
        """Wait for its end."""
        code = await asyncio.wait_for(self.process.wait(), WITHIN_S)
        await asyncio.gather(*self._readers)
        return Ended(code, *self._text)

    async def kill(self) -> None:
        """End it however it is, and everything in it with process 1."""
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await asyncio.gather(*self._readers)


def _make_place(root: Path, bind: Bind) -> None:
    """Something in the root to mount on, as an engine makes it."""
    place = root / bind.there.lstrip("/")
    if bind.here.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    elif not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _home(root: Path, user: str) -> str:
    """The home of the user in the image's passwd; engines take / for one that is not there."""
    with suppress(FileNotFoundError):
        for line in (root / "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[2] == user.partition(":")[0]:
                return fields[5]
    return "/"


def lacks() -> str:
    """What this machine lacks for containers; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root"
    if missing := [name for name in ("unshare", "nsenter", "setpriv") if not shutil.which(name)]:
        return f"needs {', '.join(missing)} (util-linux)"
    tried = subprocess.run(
        [*NAMESPACES, "mount", "-t", "tmpfs", "none", "/proc"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "no namespaces, or no mounts in them, are allowed here"


def mounts_below(place: Path) -> list[str]:
    """What is mounted below a directory, as this process sees it."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point for point in points if point.startswith(f"{place}/")]


def of_this_machine(root: Path, config: Config) -> Image:
    """An image whose root consists of this machine's Python and system files, mounted one by one.

    It shows how taskd behaves in a container, and not what RUN and COPY of the Dockerfile make.
    """
    for directory in ("proc", "dev", "app", "tmp", "run/secrets"):
        (root / directory).mkdir(parents=True)
    binds = [Bind(Path(path), path) for path in ("/usr", "/etc")]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib64")):
        if path.is_symlink():
            (root / path.name).symlink_to(path.readlink())
        elif path.exists():
            binds.append(Bind(path, str(path)))
    scripts = sysconfig.get_path("scripts")
    needed = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent}
    needed |= {Path(asyncpg.__file__).parents[1], Path(scripts)}
    needed |= {CHECKOUT / "taskd", CHECKOUT / "sql"}
    tops = (path for path in sorted(needed) if not path.is_relative_to("/usr"))
    binds += [Bind(path, str(path)) for path in tops]
    environ = config.env | {"PATH": f"{scripts}:{config.env['PATH']}"}
    own = Config(**{name: getattr(config, name) for name in Config.__slots__} | {"env": environ})
    return Image(root, own, tuple(binds))


@asynccontextmanager
async def by_tcp(dsn: str) -> AsyncIterator[tuple[str, Proxy]]:
    """A DSN that leads to the same database over TCP, and the proxy that can break it."""
    place = urlsplit(dsn)
    options = parse_qs(place.query)
    host = options.get("host", [place.hostname or ""])[0]
    proxy = Proxy(host, int(options.get("port", [place.port or 5432])[0]))
    user = place.netloc.rpartition("@")[0] or options.get("user", [""])[0]
    try:
        port = await proxy.open()
        yield f"postgresql://{user}@127.0.0.1:{port}{place.path}?sslmode=disable", proxy
    finally:
        await proxy.close()
