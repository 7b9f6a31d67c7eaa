"""A worker under what the unit forbids, in short; as a command: python -m tests.system.sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system import box, sandbox
from tests.system.sandbox import UNIT
from tests.system.sandbox_root import Sandbox
from tests.system.unit import Unit, UnitError

LACKS, LACKS_ROOT = sandbox.lacks(), box.lacks()
pytestmark = pytest.mark.skipif(bool(LACKS), reason=LACKS)
needs_root = pytest.mark.skipif(bool(LACKS_ROOT), reason=LACKS_ROOT)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("own_root", "processes"),
    [
        pytest.param(True, 1, marks=needs_root, id="in a root of its own"),
        pytest.param(True, 2, marks=needs_root, id="several processes"),
        pytest.param(False, 1, id="with this machine's root"),
    ],
)
async def test_a_worker_works_and_drains_under_what_the_unit_forbids(
    dsn: str, tmp_path: Path, own_root: bool, processes: int
) -> None:
    made = Sandbox(Unit(UNIT.read_text()), tmp_path, own_root=own_root)
    seen = await sandbox.check(made, dsn, processes=processes)
    print(made.applied, made.left, seen, sep="\n")
    assert {"SystemCallFilter", "MemoryDenyWriteExecute", "NoNewPrivileges"} <= set(made.applied)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "setting", ["MemoryDenyWriteExecute", "SystemCallFilter", "RestrictAddressFamilies"]
)
async def test_what_the_unit_no_longer_forbids_goes_well(tmp_path: Path, setting: str) -> None:
    lines = UNIT.read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(f"{setting}="))
    made = Sandbox(Unit(text), tmp_path, own_root=False)
    answers = await sandbox.tried(made)
    assert set(answers[setting]) == {0}
    for other in {*made.applied} & {*answers}:
        assert set(answers[other]) <= sandbox.REFUSALS, other


@pytest.mark.parametrize(
    "line",
    ["ProtectSoup=yes", "ProtectSystem=full", "CapabilityBoundingSet=CAP_CHOWN"],
)
def test_a_setting_that_the_trial_does_not_know_is_an_error(tmp_path: Path, line: str) -> None:
    text = UNIT.read_text().replace("[Install]", f"{line}\n[Install]")
    with pytest.raises(UnitError, match=line.partition("=")[0]):
        Sandbox(Unit(text), tmp_path, own_root=False)
