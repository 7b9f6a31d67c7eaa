"""What users install: built again, anywhere and at any time, it is the same to the last byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from taskd.store.connections.statements import load

CHECKOUT = Path(__file__).parents[2]
# The time stamp of files that hatchling uses by default, and the one that the test gives.
EPOCH = 1_600_000_000


def files() -> list[str]:
    """What belongs to the project: all that git does not ignore, or all of an unpacked sdist."""
    if not (CHECKOUT / ".git").exists():
        found = (path for path in CHECKOUT.rglob("*") if path.is_file())
        paths = [str(path.relative_to(CHECKOUT)) for path in found if path.suffix != ".pyc"]
        return [path for path in paths if path != "PKG-INFO" and not path.startswith(".")]
    stdout = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=CHECKOUT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return [path for path in stdout.split("\0") if path and (CHECKOUT / path).is_file()]


def copied(to: Path, *, mode: int, mtime: float) -> Path:
    """The project in another directory, as another user has checked it out."""
    for path in files():
        target = to / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(CHECKOUT / path, target)
        target.chmod(mode)
        os.utime(target, (mtime, mtime))
    return to


def build(source: Path, to: Path, **environment: str) -> dict[str, Path]:
    """The wheel and the sdist."""
    environ = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(to)],
        cwd=source, check=True, capture_output=True, env=environ | environment,
    )  # fmt: skip
    [wheel], [sdist] = to.glob("*.whl"), to.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def digests(built: dict[str, Path]) -> dict[str, str]:
    return {what: hashlib.sha256(path.read_bytes()).hexdigest() for what, path in built.items()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("built")
    source = copied(place / "source", mode=0o644, mtime=1_000_000_000)
    return build(source, place / "dist", TZ="UTC")


@pytest.fixture(scope="module")
def wheel(built: dict[str, Path]) -> Path:
    return built["wheel"]


def test_another_place_time_and_user_builds_the_same(
    built: dict[str, Path], tmp_path: Path
) -> None:
    source = copied(tmp_path / "elsewhere" / "deep", mode=0o600, mtime=1_700_000_001)
    again = build(source, tmp_path / "dist", TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="1")
    assert digests(again) == digests(built)


def test_the_sdist_builds_the_same_and_the_time_is_the_one_that_is_reported(
    built: dict[str, Path], tmp_path: Path
) -> None:
    with tarfile.open(built["sdist"]) as archive:
        # Debian 12's Python 3.11.2 has no filters, and newer versions require one.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    [source] = tmp_path.iterdir()
    assert digests(build(source, tmp_path / "plain")) == digests(built)
    dated = build(source, tmp_path / "dated", SOURCE_DATE_EPOCH=str(EPOCH))
    assert {info.date_time for info in zipfile.ZipFile(dated["wheel"]).infolist()} == {
        (2020, 9, 13, 12, 26, 40)
    }
    with tarfile.open(dated["sdist"]) as archive:
        assert {member.mtime for member in archive} == {EPOCH}


def test_the_wheel_carries_the_whole_package_its_sql_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path for path in files() if path.startswith("taskd/")}
    sql = {f"taskd/{path}" for path in files() if path.startswith("sql/")}
    assert {name for name in names if ".dist-info/" not in name} == package | sql
    assert {"taskd/py.typed", "taskd/sql/roles.sql", "taskd/docs/howto/upgrading.md"} <= names
    assert "taskd/sql/migrations/0001_baseline.sql" in names


def test_the_sdist_carries_what_is_in_git_and_nothing_else(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == {*files(), "PKG-INFO"}


def test_its_metadata_is_valid_and_that_of_the_project(built: dict[str, Path]) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    archive = zipfile.ZipFile(built["wheel"])
    [path] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    with tarfile.open(built["sdist"]) as sdist:
        [info] = [member for member in sdist if member.name.endswith("/PKG-INFO")]
        [here] = [sdist.extractfile(info)]
        assert here is not None
        assert here.read() == archive.read(path)
    metadata = Metadata.from_email(archive.read(path), validate=True)
    assert (metadata.name, str(metadata.version)) == ("pgtaskd", project["version"])
    stem = f"pgtaskd-{project['version']}"
    assert built["wheel"].name == f"{stem}-py3-none-any.whl"
    assert built["sdist"].name == f"{stem}.tar.gz"
    assert metadata.project_urls == project["urls"]
    assert metadata.project_urls.keys() == {"Documentation", "Changelog", "Issues", "Source"}
    versions = [each for each in metadata.classifiers or [] if re.search(r":: 3\.\d+$", each)]
    assert versions == [f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)]
    assert versions[0].endswith(project["requires-python"].removeprefix(">="))
    assert str(metadata.requires_python) == project["requires-python"]
    assert metadata.description_content_type == "text/markdown"
    assert metadata.license_expression == "MIT"
    plain = [each for each in metadata.requires_dist or [] if "extra" not in str(each.marker)]
    assert len(plain) == len(project["dependencies"])
    assert set(metadata.provides_extra or []) == set(project["optional-dependencies"])
    entries = archive.read(path.replace("METADATA", "entry_points.txt")).decode()
    assert "taskd = taskd.cli:main" in entries


def test_what_is_installed_from_the_wheel_finds_its_sql_and_warns_of_nothing(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import json, taskd; from taskd.store.connections.statements import load, sql_root\n"
        "print(json.dumps([taskd.__file__, str(sql_root()), sorted(load())]))"
    )
    stdout = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path, check=True, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
    ).stdout  # fmt: skip
    package, sql, statements = json.loads(stdout)
    assert Path(package).is_relative_to(tmp_path)
    assert Path(sql) == tmp_path / "taskd" / "sql"
    assert statements == sorted(load())
