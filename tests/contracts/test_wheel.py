"""What users install: the wheel carries the SQL and the marker of its types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from taskd.store.statements import load, sql_root

CHECKOUT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(place)],
        cwd=CHECKOUT, check=True, capture_output=True,
    )  # fmt: skip
    [built] = place.glob("*.whl")
    return built


def test_the_wheel_carries_every_sql_file_and_the_marker_of_its_types(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path.relative_to(sql_root()) for path in sql_root().rglob("*.sql")]
    here = {str(Path("taskd/sql") / path) for path in files}
    assert {name for name in names if name.endswith(".sql")} == here
    assert any("migrations/" in name for name in here)
    assert "taskd/py.typed" in names


def test_the_wheel_carries_the_package_and_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"taskd"}


def test_what_is_installed_from_the_wheel_finds_its_sql_and_warns_of_nothing(
    wheel: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        "import json, taskd; from taskd.store.statements import load, sql_root\n"
        "print(json.dumps([taskd.__file__, str(sql_root()), sorted(load())]))"
    )
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path, check=True, capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
    ).stdout  # fmt: skip
    package, sql, statements = json.loads(told)
    assert Path(package).is_relative_to(tmp_path)
    assert Path(sql) == tmp_path / "taskd" / "sql"
    assert statements == sorted(load())
