"""A root directory, a user and a process for a worker, as a systemd unit configures them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.system import box, confine, sandbox_app
from tests.system.box import Bind, Container, Image
from tests.system.dockerfile import CHECKOUT, PATH, Config
from tests.system.unit import ELSEWHERE, IN_PROCESS, IN_ROOT, Unit

CONFINE = Path(confine.__file__)
APP = Path(sandbox_app.__file__)
UID = 61184  # the first number that systemd gives to dynamic users
CREDENTIALS, NOTIFY = "/run/credentials/taskd.service", "/run/notify"
ENTER = ("unshare", "--mount", "--uts", "sh", "-c")
SETUP = """
set -e
umask 022
root=$1 settings=$2; shift 2
in_unit() { case " $settings " in *" $1 "*) ;; *) return 1 ;; esac; }
mount --bind "$root" "$root"
mount -t proc -o nosuid,nodev,noexec,hidepid=$(in_unit ProtectProc && echo invisible || echo off) \
    proc "$root/proc"
! in_unit ProtectKernelTunables || mount --bind -o ro /proc/sys "$root/proc/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
in_unit PrivateDevices || mount --rbind /dev "$root/dev"
! in_unit PrivateDevices || for each in null zero full random urandom; do
    : > "$root/dev/$each"
    mount --bind "/dev/$each" "$root/dev/$each"
done
! in_unit PrivateTmp || for each in tmp var/tmp; do
    mount -t tmpfs -o mode=1777,nosuid,nodev tmpfs "$root/$each"
done
while [ "$1" != -- ]; do
    mkdir -p "$(dirname "$root$2")"
    if [ -d "$1" ]; then mkdir -p "$root$2"; else : >> "$root$2"; fi
    mount --bind -o ro "$1" "$root$2"
    shift 2
done
shift
! in_unit ProtectSystem || mount -o remount,bind,ro "$root"
cd "$root"
pivot_root . .
umount -l .
exec "$@"
"""


class Sandbox:
    """Starts commands under the restrictions of a unit.

    Attributes:
        own_root: whether there is a root directory and a user of its own; needs root here.
        applied, left: the settings that are applied here and those that are not, each with a note.
    """

    def __init__(self, unit: Unit, place: Path, *, own_root: bool) -> None:
        self.unit, self.place, self.own_root = unit, place, own_root
        self.applied: dict[str, str] = {}
        self.left: dict[str, str] = {}
        self._image = Image(Path("/"), Config())
        filters = unit.filters()
        unit.check_known(filters)
        for name, each in filters.items():
            self.applied[name] = f"{len(each['rules'])} rules of seccomp"
        self._plan = unit.steps() | {"SystemCallFilter": list(filters.values())}
        self._plan["User"] = UID if own_root and unit.last("User") else None
        # Twice: a new user namespace comes with all of them again.
        self._plan["CapabilityBoundingSet, of this machine"] = (
            self._plan["CapabilityBoundingSet"] if os.geteuid() == 0 else None
        )
        for name, note in IN_PROCESS.items():
            if self._plan.get(name) is not None:
                self.applied[name] = note
        for name, note in IN_ROOT.items():
            if name in unit.settings:
                wanted = self.applied if own_root else self.left
                wanted[name] = note if own_root else "needs root and namespaces"
        self.left |= {name: note for name, note in ELSEWHERE.items() if name in unit.settings}

    def _path(self, inside: str, here: Path) -> str:
        return inside if self.own_root else str(here)

    def _prepare(self) -> list[Bind]:
        """Files that the worker reads, readable for its user alone where they are secret."""
        app, credentials = self.place / "app", self.place / "credentials"
        for directory in (app, credentials):
            directory.mkdir(exist_ok=True)
            directory.chmod(0o755)
        shutil.copy(APP, app)
        plan = app / "plan.json"
        plan.write_text(json.dumps(self._plan))
        for file in app.iterdir():
            if file.is_file():
                file.chmod(0o644)
        return [Bind(app, "/app"), Bind(credentials, CREDENTIALS), Bind(Path("/sys"), "/sys")]

    def credential(self, name: str, text: str) -> None:
        """Put a secret where LoadCredential would."""
        self._prepare()
        file = self.place / "credentials" / name
        file.write_text(text)
        file.chmod(0o400)
        if self.own_root:
            os.chown(file, UID, UID)

    async def start(self, argv: Sequence[str], environ: Mapping[str, str]) -> Container:
        """A process that has given up everything, and then became the command."""
        binds = self._prepare()
        notify = self.place / "notify"
        inside = [
            sys.executable, str(CONFINE),
            self._path("/app/plan.json", self.place / "app" / "plan.json"), *argv,
        ]  # fmt: skip
        if self.own_root:
            root = self.place / "root"
            if not root.exists():
                image = box.of_this_machine(root, Config())
                self._image = Image(root, image.config, image.binds)
                for each in ("sys", "var/tmp"):
                    (root / each).mkdir(parents=True)
            binds += [*self._image.binds, Bind(CHECKOUT / "tests", str(CHECKOUT / "tests"))]
            if notify.exists():
                binds.append(Bind(notify, NOTIFY))
            mounts = [each for bind in binds for each in (str(bind.here), bind.there)]
            inside = [
                *ENTER,
                SETUP,
                "sh",
                str(root),
                " ".join(self.applied),
                *mounts,
                "--",
                *inside,
            ]
        own = {
            "PATH": PATH,
            "HOME": "/",
            "PYTHONPATH": f"{self._path('/app', self.place / 'app')}:{CHECKOUT}",
            "NOTIFY_SOCKET": self._path(NOTIFY, notify),
            "CREDENTIALS_DIRECTORY": self._path(CREDENTIALS, self.place / "credentials"),
            "WATCHDOG_USEC": str(int(float(self.unit.last("WatchdogSec") or 0) * 1e6)),
        }
        process = await asyncio.create_subprocess_exec(
            *inside,
            env=own | self.unit.environment | dict(environ),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        container = Container(self._image, process, environ)
        try:
            confined = await container.wait_for("confined")
        except BaseException:
            await container.kill()
            raise
        for name, why in confined["refused"].items():
            self.applied.pop(name, None)
            self.left[name] = why
        return container
