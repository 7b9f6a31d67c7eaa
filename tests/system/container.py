"""Builds the image of the Dockerfile without an engine, runs it, and checks every promise of it.

    python -m tests.system.container --base /var/tmp/base

Each FROM is a copy of a base: a root directory of Debian with Python, made by debootstrap unless
--base names one (it is made there when it does not exist, and kept). COPY and RUN are carried out,
RUN as root in namespaces of its own, with this machine's network, certificates and settings of
pip. Then the last stage runs against a PostgreSQL over TCP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg

from taskd import embedded
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from tests.system import box, dockerfile
from tests.system.box import Bind, Container, Image, by_tcp
from tests.system.dockerfile import CHECKOUT, Config, Stage, Step
from tests.system.shell import Proxy

APP = Path(__file__).with_name("box_app.py")
WITHIN_S = 30.0
SUITE = "trixie"  # the Debian of the Dockerfile's base
PACKAGES = "python3,python3-venv,ca-certificates"
# What a build takes from the machine that it runs on; nothing of it stays in the image.
FROM_HERE = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs", "/etc/pip.conf")
FROM_ENVIRONMENT = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_", "https_", "no_proxy")
# Where a forgotten tool would be; the pip of the base image belongs to the base image.
TOOLS = ("gcc", "cc", "make", "hatchling", "git")


def make_base(place: Path) -> None:
    """A minimal Debian with Python as `python`, as the official images have it."""
    if not shutil.which("debootstrap"):
        raise SystemExit("there is no debootstrap here; install it, or give a root as --base")
    began = time.monotonic()
    half = place.with_name(place.name + ".half")
    arguments = ["--variant=minbase", f"--include={PACKAGES}", SUITE, str(half)]
    subprocess.run(
        ["unshare", "--mount", "debootstrap", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    half.rename(place)
    print(f"base: {time.monotonic() - began:.1f} s")


class Builder:
    """Carries out the instructions of all stages.

    Args:
        base: the root that stands for the image which FROM names.
        place: where the stages' roots go.
    """

    def __init__(self, base: Path, place: Path) -> None:
        self._base, self._place = base, place
        self._roots: dict[str, Path] = {}

    def build(self, stages: list[Stage]) -> Image:
        """The image of the last stage."""
        for number, stage in enumerate(stages):
            began = time.monotonic()
            root = self._place / f"stage{number}"
            subprocess.run(["cp", "-a", "--reflink=auto", self._base, root], check=True)
            python = root / "usr/local/bin/python"
            if not python.exists():
                python.symlink_to("/usr/bin/python3")
            image = Image(root, Config())
            for step in stage.steps:
                self._carry_out(step, image)
            self._roots[stage.name] = root
            print(f"stage {stage.name or number}: {time.monotonic() - began:.1f} s")
        return image

    def _carry_out(self, step: Step, image: Image) -> None:
        if step.word == "RUN":
            self._run(step.text, image)
        elif step.word == "COPY":
            self._copy(step, image)
        elif image.config.apply(step) and step.word == "WORKDIR":
            (image.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _run(self, text: str, image: Image) -> None:
        binds = [Bind(Path(path), path) for path in FROM_HERE if Path(path).exists()]
        mine = {k: v for k, v in os.environ.items() if k.startswith(FROM_ENVIRONMENT)}
        with _only_while_mounted(image.root, binds):
            ended = subprocess.run(
                image.command(["sh", "-c", text], environ=mine, binds=binds, writable=True),
                env=os.environ | {"HOST_NAME": "build"},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
        if ended.returncode:
            raise SystemExit(
                f"RUN {text}\nexit code {ended.returncode}\n{ended.stdout}{ended.stderr}"
            )

    def _copy(self, step: Step, image: Image) -> None:
        *sources, target = step.text.split()
        into = image.root / os.path.join(image.config.directory, target).lstrip("/")
        stage = step.options.get("from")
        for source in sources:
            if stage is not None:
                here = self._roots[stage] / source.lstrip("/")
                shutil.copytree(here, into, symlinks=True, dirs_exist_ok=True)
                continue
            files = [path for path in dockerfile.context() if _is_in(path, source)]
            assert files, f"COPY {source}: the context has no such file"
            for path in files:
                # A directory's content goes into the target; a file, under its name.
                name = os.path.relpath(path, source) if path != source else Path(source).name
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(CHECKOUT / path, into / name)


def _is_in(path: str, source: str) -> bool:
    return path == source or path.startswith(source + "/")


@contextmanager
def _only_while_mounted(root: Path, binds: list[Bind]) -> Iterator[None]:
    """Empty places to mount files on belong to the build, not to the image."""
    missing = [p for bind in binds if not (p := root / bind.there.lstrip("/")).exists()]
    yield
    for path in missing:
        path.rmdir() if path.is_dir() else path.unlink()


def look(image: Image) -> None:
    """What must not be in an image."""
    own = image.root / "opt/taskd"
    [packages] = own.glob("lib/python3*/site-packages")
    installed = sorted(path.name.split("-")[0] for path in packages.glob("*.dist-info"))
    print(f"packages: {', '.join(installed)}")
    assert "pgtaskd" in installed
    assert not {"pip", "hatchling", "setuptools", "wheel"} & set(installed)
    for directory in image.config.env["PATH"].split(":"):
        for tool in TOOLS:
            assert not (image.root / directory.lstrip("/") / tool).exists(), f"{directory}/{tool}"
    assert not (image.root / "build").exists()
    assert not list((image.root / "app").iterdir())
    assert not list(own.rglob(".env*")) + list(own.rglob("tests/system"))
    size = sum(path.lstat().st_size for path in own.rglob("*"))
    [library] = image.root.glob("usr/lib/python3.*/asyncio")
    uncompiled = [
        path
        for place in (packages, library)
        for path in place.rglob("*.py")
        if not any((path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"))
    ]
    assert not uncompiled, "every start would compile these anew"
    for path in [own, *own.rglob("*")]:
        assert path.lstat().st_uid == 0, f"{path}: the worker could change its own code"
    print(f"/opt/taskd: {size / 1e6:.1f} MB; the context: {len(dockerfile.context())} files")


async def check(image: Image, dsn: str, place: Path) -> dict[str, Any]:
    """Run the image as its users would, and check every promise of the README's section.

    Returns:
        The observations, as text.

    Raises:
        AssertionError: a promise does not hold.
    """
    version = await image.run("--version")
    assert version.code == 0, version
    (place / "app").mkdir()
    shutil.copy(APP, place / "app")
    app, secret = Bind(place / "app", "/app"), place / "dsn"
    refused = await image.run(environ={"TASKD_APP": "box_app"}, binds=[app])
    assert refused.code == 78, refused
    assert "TASKD_DSN" in refused.err, refused
    async with by_tcp(dsn) as (front, proxy):
        secret.write_text(front)
        secret.chmod(0o444)
        options = {
            "environ": {"TASKD_APP": "box_app", "TASKD_DSN_FILE": "/run/secrets/dsn"},
            "binds": [Bind(secret, "/run/secrets/dsn"), app],
        }
        alone = await image.run(*image.config.health[1:], **options)
        assert alone.code == 4, alone
        container = await image.start(**options)
        try:
            seen = await _life(container, dsn)
        finally:
            await container.kill()
        container = await image.start(**options)
        try:
            await _outage(container, proxy)
        finally:
            await container.kill()
    return {"version": version.out.strip(), "without a DSN": refused.err.strip()} | seen


async def _life(container: Container, dsn: str) -> dict[str, Any]:
    ready = await container.wait_for("worker.ready")
    assert "box" in str(ready), ready
    healthy = await container.health()
    assert healthy.code == 0, healthy
    sql = await asyncpg.connect(dsn)
    try:
        looks = await _result(sql, "looks")
        uid, gid = map(int, container.image.config.user.split(":"))
        assert looks == {
            "pid": 1,
            "uid": uid,
            "gid": gid,
            "groups": [],
            "capabilities": 0,
            "writable": [],
        }
        children = await _result(sql, "has_children")
        assert children["waited"] == 0, children
        await sql.execute("SELECT taskd.enqueue('sleeps', '{\"s\": 0.5}')")
        # A job that was claimed and has not started is released.
        await container.wait_for("sleeps 0.5")
        container.stop()
        ended = await container.ended()
        assert ended.code == 0, ended
        left = await sql.fetchval("SELECT count(*) FROM taskd.jobs WHERE state <> 'done'")
        assert left == 0, "a drained worker leaves no job"
        assert await sql.fetchval("SELECT bool_and(died_at IS NOT NULL) FROM taskd.worker")
    finally:
        await sql.close()
    report = await container.wait_for("worker.stopped")
    return {
        "healthy": healthy.out.strip(),
        "orphans that stay as zombies": children["orphaned"],
        "drained in s": report.get("drain_s"),
    }


async def _result(sql: Any, task: str) -> Any:
    job_id = await sql.fetchval("SELECT taskd.enqueue($1)", task)
    question = "SELECT state::text, result::text, errors::text FROM taskd.job_history WHERE id = $1"
    async with asyncio.timeout(WITHIN_S):
        while (row := await sql.fetchrow(question, job_id)) is None:
            await asyncio.sleep(0.02)
    assert row["state"] == "done", row
    return json.loads(row["result"])


async def _outage(container: Container, proxy: Proxy) -> None:
    """The check reports that it cannot know, and the worker stays."""
    await container.wait_for("worker.ready")
    proxy.fail("refuses")
    unknown = await container.health()
    assert unknown.code == 69, unknown
    assert container.process.returncode is None


@contextmanager
def database() -> Iterator[str]:
    """The DSN of a migrated database on an embedded server of one's own."""
    with tempfile.TemporaryDirectory() as home:
        server = embedded.start(Path(home) / "pg", durable=False)
        try:
            dsn = server.dsn("taskd")
            asyncio.run(migrations.migrate(Database({"dsn": dsn})))
            yield dsn
        finally:
            server.close()


def main() -> None:
    """Build the image, check it, run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="a root directory with Python and its venv")
    options = parser.parse_args()
    if lacks := box.lacks():
        raise SystemExit(lacks)
    with tempfile.TemporaryDirectory(prefix="taskd-image-") as directory:
        place = Path(directory)
        base = options.base or place / "base"
        if not base.exists():
            make_base(base)
        image = Builder(base, place).build(dockerfile.ours())
        look(image)
        with database() as dsn:
            seen = asyncio.run(check(image, dsn, place))
        for name, value in seen.items():
            print(f"{name}: {value}")
        assert not box.mounts_below(place), "mounts were left behind"
    print("every check passed")


if __name__ == "__main__":
    main()
