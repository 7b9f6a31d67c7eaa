"""The protocols as models: who may run a job (lease.pml), and who is woken for it (busy_mark.pml).

python -m tests.models                   # every scene, every mechanism removed, larger bounds
python -m tests.models --short           # without the larger bounds
python -m tests.models FENCE RECONCILE   # only the removal of these mechanisms
python -m tests.models --trail FENCE     # ... and the last steps before each error

spin searches every order in which the steps of a scene can happen. The scenes are the protocols as
they are built, each with bounds on the faults in it. In a scene no assertion may fail, no process
may get stuck, and no execution may go on for ever without a job that ends (under weak fairness:
a process that can always go on does so at some time). Each #define that the head of a model lists
is one mechanism of the code; without it, spin must find the error that the mechanism prevents.

How to read a counterexample: `--trail` shows its last steps, the newest at the end, with the line
of the model for each, and then the values of all variables. Find the assertion that failed (its
comment is the promise). Then go back to the step that wrote the row last, and see what each
process knew at that time. Almost always two statements were under way at once, and one of them
used older data.

What the models leave out: time (a lease can run out at any step; the system tests in
tests/system/faults measure that the self-fence stops handlers before other workers may start);
batches, queues, limits, keys, workflows; retention (the history keeps everything); the refund of
only ten interrupts, and the crash that a third one counts as; locks, deadlocks and plans; two
servers that both act as the primary.
Notifications that another worker requests, and marks that expire because a worker hangs, only add
wake-ups, and no worker is ever full. After a failover that has lost a claim, check_acks may answer
`lost` or `acked` wrongly (the answer goes to the log only); the rows are checked all the same.

Bounds: one job and two processes (each may start again), two jobs with poison pills; each fault
happens once, some twice in the long form; one worker and two producers, in the long form three, or
two workers and one producer. The nemesis and the faults of tests/system look for errors that need
more faults.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
MISSING = "spin and a C compiler are needed: apt install spin gcc"
DEPTH_MAX = 100_000
MEMORY_MB_MAX = 3000
SEARCH_S_MAX = 1200.0
STEPS_SHOWN = 60

# Failed assertions and deadlocks; and also executions that go on for ever.
SAFETY: tuple[list[str], list[str]] = (["-DSAFETY", "-DNOCLAIM"], [])
LIVENESS: tuple[list[str], list[str]] = (["-DNP", "-DNFAIR=4"], ["-l", "-f"])


@dataclass(frozen=True)
class Scene:
    """The faults of a scene, and how often each happens.

    Attributes:
        mechanisms: the mechanisms that this scene needs.
        more: bounds of the long form, where they differ.
        ends: whether to search for executions that go on for ever, which doubles the states.
    """

    model: str
    name: str
    bounds: dict[str, int]
    mechanisms: tuple[str, ...] = ()
    more: dict[str, int] = field(default_factory=dict)
    ends: bool = True


SCENES = (
    Scene(
        "lease", "declared dead",
        {"KILLS": 1, "SUSPICIONS": 1, "LOST_CLAIMS": 1},
        ("FENCE", "LEVEL", "RESCUE_GUARD", "OWNER_LIST", "RECONCILE", "GRACE", "ADOPT"),
    ),
    Scene(
        "lease", "ambiguous acks",
        {"SUSPICIONS": 1, "LOST_ACKS": 1, "LOST_CLAIMS": 1},
        ("LOOKUP", "HISTORY", "WORKER_LOST"),
        {"FAILURES": 1},
    ),
    Scene(
        "lease", "declared dead and lost acks",
        {"KILLS": 1, "SUSPICIONS": 1, "LOST_CLAIMS": 1, "LOST_ACKS": 1},
        ("ITS_CLAIM",),
        ends=False,
    ),
    Scene(
        "lease", "failover",
        {"KILLS": 1, "FAILOVERS": 1, "FORGOTTEN": 1},
        ("OWNER", "STRIDE", "SAME_JOB"),
        {"LOST_ACKS": 1, "SUSPICIONS": 1},
    ),
    Scene(
        "lease", "pill",
        {"JOBS": 2},
        ("BUDGET", "APART", "BLAME", "ISOLATE", "OUTLIVE"),
        {"LOST_CLAIMS": 1},
    ),
    Scene(
        "lease", "by hand",
        {"CANCELS": 1, "RETRIES": 1, "FAILURES": 1, "LOST_ACKS": 1},
        ("KEEP_FENCE", "HEED_CANCEL", "CANCEL_LOCKED"),
        {"FAILURES": 2, "SUSPICIONS": 1},
    ),
    Scene(
        "lease", "drain",
        {"DRAINS": 1, "RELEASES": 1, "KILLS": 1},
        (),
        {"RELEASES": 2, "LOST_CLAIMS": 1},
    ),
    Scene(
        "busy_mark", "hand-over",
        {"PRODUCERS": 2},
        ("AFTER_XID", "WITHDRAW", "NEW_XID", "WAIT", "LAST_CLAIM", "FIRST", "LISTEN_FIRST",
         "NEEDED"),
        {"PRODUCERS": 3},
    ),
    Scene(
        "busy_mark", "two workers",
        {"PRODUCERS": 1, "WORKERS": 2},
        ("LEFT_ALONE",),
        ends=False,
    ),
    Scene(
        "busy_mark", "connection",
        {"PRODUCERS": 1, "BREAKS": 1},
        ("REMADE",),
        {"PRODUCERS": 2, "BREAKS": 2},
    ),
    Scene(
        "busy_mark", "repeatable read",
        {"PRODUCERS": 1, "STRICT": 1},
        ("ISOLATION",),
        {"PRODUCERS": 2},
    ),
    Scene(
        "busy_mark", "declared dead alive",
        {"PRODUCERS": 1, "BURIALS": 1},
        ("REBORN", "OWN_XID"),
        {"PRODUCERS": 2},
    ),
    Scene(
        "busy_mark", "failover",
        {"PRODUCERS": 1, "BREAKS": 1, "FORGOTTEN": 1},
        ("TAKEN_BACK",),
        {"PRODUCERS": 2},
    ),
    Scene(
        "busy_mark", "another leaves",
        {"PRODUCERS": 1, "LEAVES": 1},
        ("ALONE",),
        {"PRODUCERS": 2, "BURIALS": 1},
    ),
    Scene(
        "busy_mark", "late mark",
        {"PRODUCERS": 1, "LOST_MARKS": 1},
        ("LATER",),
        {"PRODUCERS": 2, "SPELLS": 2},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """A scene as it is built, or without one mechanism."""

    scene: Scene
    without: str | None = None
    liveness: bool = False
    long: bool = False

    @property
    def name(self) -> str:
        """The name in the table."""
        kind = f"without {self.without}" if self.without else ("ends" if self.liveness else "safe")
        return f"{self.scene.model}, {self.scene.name}: {kind}"


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        verdict: `holds`, or the error.
        steps: the last steps before the error.
    """

    verdict: str
    states: int
    depth: int
    seconds: float
    steps: str = ""

    def is_expected_of(self, variant: Variant) -> bool:
        """Whether spin found an error if a mechanism is missing, and none otherwise."""
        wrong = self.verdict.startswith(("assertion", "non-progress", "invalid end"))
        return wrong if variant.without else self.verdict == "holds"


def mechanisms(model: str) -> list[str]:
    """Return the mechanisms that the head of a model lists."""
    head = (HERE / f"{model}.pml").read_text(encoding="utf-8").partition("*/")[0]
    listed = re.findall(r"(?m)^ \*   ([A-Z_]+(?:, [A-Z_]+)*)  ", head)
    return [name for names in listed for name in names.split(", ")]


def variants(*, long: bool) -> Iterator[Variant]:
    """Yield every scene, and every removal of a mechanism; the long form adds larger bounds."""
    for scene in SCENES:
        yield Variant(scene)
        if scene.ends:
            yield Variant(scene, liveness=True)
        if long and scene.more:
            yield Variant(scene, long=True)
        for name in scene.mechanisms:
            yield Variant(scene, without=name)


def missing() -> bool:
    """Return whether spin or gcc is missing."""
    return not (shutil.which("spin") and shutil.which("gcc"))


def check(variant: Variant, *, trail: bool = False) -> Found:
    """Build the variant in a temporary directory and search it."""
    with tempfile.TemporaryDirectory() as directory:
        return _check(variant, Path(directory), trail=trail)


def _check(variant: Variant, directory: Path, *, trail: bool) -> Found:
    began = time.monotonic()
    scene = variant.scene
    bounds = scene.bounds | (scene.more if variant.long else {})
    defines = [f"-D{name}" for name in mechanisms(scene.model) if name != variant.without]
    defines += [f"-D{name}={count}" for name, count in bounds.items()]
    (directory / "model.pml").write_bytes((HERE / f"{scene.model}.pml").read_bytes())
    build, search = LIVENESS if variant.liveness else SAFETY
    # For a short search an optimizing compiler takes longer than the search.
    build = ["-O2" if variant.long else "-O0", "-w", f"-DMEMLIM={MEMORY_MB_MAX}", *build]
    _run(["spin", *defines, "-a", "model.pml"], directory)
    _run(["gcc", *build, "-o", "pan", "pan.c"], directory)
    said = _run(["./pan", f"-m{DEPTH_MAX}", *search], directory, timeout_s=SEARCH_S_MAX)
    steps = ""
    if trail and (directory / "model.pml.trail").exists():
        steps = _run(["spin", *defines, "-t", "-p", "model.pml"], directory)
    return _found(said, time.monotonic() - began, steps)


def _found(said: str, seconds: float, steps: str) -> Found:
    wrong = re.search(r"pan:\d+: (.*?)(?: \(at depth \d+\))?$", said, re.MULTILINE)
    states, depth = re.search(r"(\d+) states, stored", said), re.search(r"reached (\d+)", said)
    complete = "errors: 0" in said and "max search depth too small" not in said
    verdict = wrong.group(1) if wrong else ("holds" if complete else "not searched to its end")
    return Found(
        verdict,
        int(states.group(1)) if states else 0,
        int(depth.group(1)) if depth else 0,
        seconds,
        steps,
    )


def _run(command: list[str], directory: Path, timeout_s: float = 120.0) -> str:
    ended = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if ended.returncode and command[0] != "./pan":
        raise RuntimeError(f"{command[0]} failed:\n{ended.stdout}{ended.stderr}")
    return ended.stdout + ended.stderr


def main() -> int:
    """Return 0 if all results are as expected, 4 if not, 69 if spin or gcc is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("without", nargs="*", metavar="MECHANISM", help="only without these")
    parser.add_argument("--short", action="store_true", help="without the larger bounds")
    parser.add_argument("--trail", action="store_true", help="show the last steps of each error")
    asked = parser.parse_args()
    if missing():
        print(MISSING, file=sys.stderr)
        return 69
    known = {name for scene in SCENES for name in scene.mechanisms}
    if unknown := set(asked.without) - known:
        parser.error(f"no such mechanism: {', '.join(sorted(unknown))}; there are {sorted(known)}")
    every = True
    print(f"{'variant':<48} {'verdict':<52} {'states':>10} {'depth':>7} {'s':>6}")
    for variant in variants(long=not asked.short):
        if asked.without and variant.without not in asked.without:
            continue
        found = check(variant, trail=asked.trail)
        expected = found.is_expected_of(variant)
        every &= expected
        verdict = found.verdict if len(found.verdict) <= 52 else found.verdict[:49] + "..."
        name = variant.name + (", larger" if variant.long else "")
        line = f"{name:<48} {verdict:<52} {found.states:>10,} {found.depth:>7,}"
        line += f" {found.seconds:>6.1f}" + ("" if expected else "   NOT AS EXPECTED")
        print(line, flush=True)
        if found.steps:
            print("\n".join(found.steps.splitlines()[-STEPS_SHOWN:]))
    return 0 if every else 4
