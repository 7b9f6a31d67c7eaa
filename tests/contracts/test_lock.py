"""requirements.lock fits pyproject.toml, and every line of it is checked by hash."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2]
LOCK = (CHECKOUT / "requirements.lock").read_text(encoding="utf-8")
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
WANTED = [
    *PROJECT["project"]["dependencies"],
    *PROJECT["project"]["optional-dependencies"]["mail"],
    *PROJECT["project"]["optional-dependencies"]["web"],
    *PROJECT["build-system"]["requires"],
]
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of hashes by name; any other kind of line is an error."""
    found = {}
    plain = re.sub(r"(?m)^ *#.*\n", "", LOCK)
    for entry in plain.replace("\\\n", " ").splitlines():
        pin, *hashes = entry.split()
        name, _, version = pin.partition("==")
        assert version, entry
        assert all(HASH.fullmatch(each) for each in hashes), entry
        found[canonicalize_name(name)] = (version, len(hashes))
    return found


def test_every_dependency_is_locked_within_its_range() -> None:
    versions = locked()
    for each in map(Requirement, WANTED):
        version, _ = versions[canonicalize_name(each.name)]
        assert each.specifier.contains(version), f"{each} does not allow {version}"


def test_every_line_of_the_lock_has_hashes() -> None:
    assert locked()
    assert [name for name, (_, hashes) in locked().items() if not hashes] == []


def test_the_lock_names_nothing_that_nobody_needs() -> None:
    needed: set[str] = set()
    waiting = [Requirement(each).name for each in WANTED]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in locked() and name not in needed:
            needed.add(name)
            found = map(Requirement, distribution(name).requires or [])
            # A marker may be true on another Python; extras were not requested.
            waiting += [one.name for one in found if "extra" not in str(one.marker)]
    assert set(locked()) == needed


def test_the_lock_names_no_host() -> None:
    assert "://" not in LOCK
    assert not re.search(r"(?m)^\s*--(?!hash)", LOCK)
    assert "pip-compile" in LOCK, "how it is made anew"
