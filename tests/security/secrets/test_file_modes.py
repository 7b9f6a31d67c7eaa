"""Files with secrets that other users can read, and a data directory that they can replace."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from taskd.config import load
from taskd.config.secrets import open_to_others
from taskd.embedded.data_directory import make_home
from taskd.errors import EmbeddedError

DSN = "postgresql://ada:canary-4711@db/x"
PASSWORD = "a long password"


def written(path: Path, text: str, mode: int) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def exposed(directory: Path, **environ: str) -> tuple[str, ...]:
    return load(environ=environ, directory=directory).exposed


@pytest.mark.parametrize("mode", [0o644, 0o444, 0o604, 0o606])
def test_a_dsn_file_of_the_user_that_others_can_read_is_taken_with_a_warning(
    tmp_path: Path, mode: int
) -> None:
    file = written(tmp_path / "dsn", DSN, mode)
    assert exposed(tmp_path, TASKD_DSN_FILE=str(file)) == (
        f"other users can read {file}, which contains a secret: chmod 600 {file}",
    )


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_dsn_file_that_only_its_user_can_read_gives_no_warning(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path / "dsn", DSN, mode)
    assert exposed(tmp_path, TASKD_DSN_FILE=str(file)) == ()


def test_a_key_of_a_client_certificate_is_a_secret(tmp_path: Path) -> None:
    key = written(tmp_path / "key", "key", 0o644)
    says = (f"other users can read {key}, which contains a secret: chmod 600 {key}",)
    assert exposed(tmp_path, TASKD_DSN=f"postgresql://ada@db/x?sslkey={key}") == says
    assert exposed(tmp_path, TASKD_DSN="postgresql://ada@db/x", PGSSLKEY=str(key)) == says


def test_a_dsn_without_a_password_is_no_secret(tmp_path: Path) -> None:
    file = written(tmp_path / "dsn", "postgresql://ada@db/x", 0o644)
    assert exposed(tmp_path, TASKD_DSN_FILE=str(file)) == ()


@pytest.mark.parametrize("mode", [0o440, 0o444, 0o644])
def test_a_mounted_secret_of_root_is_taken_without_a_warning(
    tmp_path: Path, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    credential = written(tmp_path / "dsn", DSN, mode)
    monkeypatch.setattr(os, "geteuid", lambda: credential.stat().st_uid + 1)
    loaded = load(environ={"CREDENTIALS_DIRECTORY": str(tmp_path)}, directory=tmp_path)
    assert (loaded.settings.dsn, loaded.exposed) == (DSN, ())


@pytest.mark.parametrize(("uid", "mode", "open_"), [(0, 0o440, False), (1000, 0o440, True)])
def test_for_root_the_group_does_not_count(
    tmp_path: Path, uid: int, mode: int, open_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(os.stat(written(tmp_path / "file", "x", mode)))
    found[stat.ST_UID] = uid
    monkeypatch.setattr(Path, "stat", lambda _: os.stat_result(found))
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert open_to_others(tmp_path / "file") is open_


@pytest.mark.parametrize(
    "line",
    [
        f'dsn = "{DSN}"',
        'smtp_password = "canary"',
        'commands = {a = {argv = ["cat"], env = {KEY = "canary"}}}',
    ],
)
def test_a_file_of_settings_with_a_secret_is_one_too(tmp_path: Path, line: str) -> None:
    file = written(tmp_path / "taskd.toml", line, 0o644)
    assert exposed(tmp_path) == (
        f"other users can read {file}, which contains a secret: chmod 600 {file}",
    )


def test_a_file_of_settings_without_a_secret_is_for_everybody(tmp_path: Path) -> None:
    written(tmp_path / "taskd.toml", 'dsn = "postgresql://ada@db/x"\nconcurrency = 5', 0o644)
    assert exposed(tmp_path) == ()


def test_commands_print_the_warning_and_continue(taskd: Any, home: Path) -> None:
    file = written(home / "password", PASSWORD, 0o644)
    said = taskd("config", TASKD_WEB_PASSWORD_FILE=str(file))
    assert f"taskd: other users can read {file}" in said.stderr
    said = taskd("doctor", "settings", TASKD_WEB_PASSWORD_FILE=str(file), code=4)
    assert f"other users can read {file}" in " ".join(said.stdout.split())
    assert PASSWORD not in said.output


def test_a_password_file_of_libpq_that_others_can_read_is_refused_as_in_psql(
    home: Path,
) -> None:
    file = written(home / "pgpass", "*:*:*:*:canary-4711\n", 0o644)
    environ = os.environ | {"PGPASSFILE": str(file), "TASKD_DSN": "postgresql://ada@127.0.0.1:1/x"}
    said = subprocess.run(
        [sys.executable, "-m", "taskd", "queues", "list"],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "has group or world access" in said.stderr


@pytest.mark.parametrize(("mode", "refused"), [(0o777, True), (0o757, True), (0o1777, False)])
def test_a_data_directory_that_every_user_can_replace_is_refused(
    tmp_path: Path, mode: int, refused: bool
) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(mode)
    home = parent / "taskd" / "pg18"
    if refused:
        with pytest.raises(EmbeddedError, match=f"every user can write to {parent}: chmod o-w"):
            make_home(home)
    else:
        make_home(home)
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
