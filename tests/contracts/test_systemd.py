"""The units of systemd/: they parse, fit the code, and allow a worker no more than it needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from taskd import config, errors
from taskd.core.jobs.job import check_queue
from taskd.worker.processes.parent import HOPELESS
from taskd.worker.sd_notify import STATUS_EVERY_S
from taskd.worker.stopping.parent_watch import longest_stop_s
from tests.contracts.readme import CHECKOUT, DOCS, EXIT_CODES

UNITS = sorted((CHECKOUT / "systemd").iterdir())
EXPOSURE_MAX = 1.5

analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def settings(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


@pytest.fixture(params=UNITS, ids=lambda unit: unit.name)
def unit(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def installed(unit: Path, tmp_path: Path) -> Path:
    """The unit with a program that exists here."""
    text = unit.read_text(encoding="utf-8")
    made = tmp_path / unit.name.replace("@.", "@email.")
    made.write_text(
        text.replace("/opt/taskd/bin/taskd", str(Path(sys.executable).parent / "taskd"))
    )
    return made


def test_there_is_one_for_all_queues_and_one_for_a_queue() -> None:
    assert [unit.name for unit in UNITS] == ["taskd.service", "taskd@.service"]
    one, each = (settings(unit) for unit in UNITS)
    differ = {name for name in one | each if one.get(name) != each.get(name)}
    assert differ == {"Description", "ExecStart", "EnvironmentFile"}
    assert one["ExecStart"] == ["/opt/taskd/bin/taskd run"]
    assert each["ExecStart"] == ["/opt/taskd/bin/taskd run --queue %i"]
    check_queue("email.eu-1_a")  # what may stand after the @: systemd leaves all of it as it is
    assert set("email.eu-1_a") <= set("abcdefghijklmnopqrstuvwxyz0123456789:-_.")


def test_a_stop_is_given_the_time_that_it_takes(unit: Path) -> None:
    [stop_s] = settings(unit)["TimeoutStopSec"]
    assert float(stop_s) >= longest_stop_s(config.Settings())
    assert settings(unit)["KillMode"] == ["mixed"]


def test_the_watchdog_and_readiness_are_what_the_worker_says(unit: Path) -> None:
    assert settings(unit)["Type"] == ["notify"]
    assert settings(unit)["NotifyAccess"] == ["main"]
    assert float(settings(unit)["WatchdogSec"][0]) >= 10 * STATUS_EVERY_S
    assert settings(unit)["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_what_no_restart_fixes_is_not_restarted_and_all_else_is(unit: Path) -> None:
    [codes] = settings(unit)["RestartPreventExitStatus"]
    prevented = {int(code) for code in codes.split()}
    assert prevented == set(HOPELESS)
    assert prevented <= set(EXIT_CODES)
    assert {errors.ConfigError.exit_code, errors.PermissionDenied.exit_code} <= prevented
    assert errors.SchemaError.exit_code in prevented
    assert errors.StoreUnavailable.exit_code not in prevented
    assert settings(unit)["Restart"] == ["always"]
    assert settings(unit)["StartLimitIntervalSec"] == ["0"]


def test_the_dsn_is_a_credential_and_a_forgotten_one_an_error(unit: Path, tmp_path: Path) -> None:
    [credential] = settings(unit)["LoadCredential"]
    name, _, source = credential.partition(":")
    assert source == "/etc/taskd/dsn"
    (tmp_path / name).write_text("postgresql://app@db.example.org/app\n")
    variables = dict(each.split("=", 1) for each in settings(unit)["Environment"])
    loaded = config.load(
        environ=variables | {"CREDENTIALS_DIRECTORY": str(tmp_path)}, directory=tmp_path
    )
    assert loaded.settings.dsn == "postgresql://app@db.example.org/app"
    assert loaded.settings.embedded == "off"
    known = {f"TASKD_{each.name.upper()}" for each in fields(config.Settings)}
    assert {each for each in variables if each.startswith("TASKD_")} <= known


def test_a_credential_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    unreadable = str(tmp_path / ("x" * 300))  # as root, no permission is missing anywhere
    with pytest.raises(errors.ConfigError, match=r"CREDENTIALS_DIRECTORY .* cannot be read"):
        config.load(environ={"CREDENTIALS_DIRECTORY": unreadable}, directory=tmp_path)


def test_mail_and_webhooks_can_go_out(unit: Path) -> None:
    assert "IPAddressDeny" not in settings(unit)
    assert "PrivateNetwork" not in settings(unit)
    assert settings(unit)["RestrictAddressFamilies"] == ["AF_UNIX AF_INET AF_INET6"]
    # A worker proves by /proc that its predecessor on this host is gone.
    assert "ProcSubset" not in settings(unit)


def test_the_page_names_what_the_units_name(unit: Path) -> None:
    text = (DOCS / "howto/systemd.md").read_text(encoding="utf-8")
    for path in (f"systemd/{unit.name}", "/etc/taskd/dsn", "/etc/taskd/taskd.env", "/opt/taskd"):
        assert path in text


@analyze
def test_systemd_has_nothing_to_say_about_it(installed: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(installed)],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # What it does not understand it only mentions; other units of this machine do not concern us.
    warnings = [line for line in done.stderr.splitlines() if installed.name in line]
    assert not warnings


@analyze
def test_systemd_finds_it_hardly_exposed(installed: Path) -> None:
    threshold = f"--threshold={EXPOSURE_MAX * 10:.0f}"
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", threshold, str(installed)],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    [exposure] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert float(exposure) <= EXPOSURE_MAX
