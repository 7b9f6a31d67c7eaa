"""The bounds of the soak's figures. Each bound is a constant, with its reason.

A figure at the end is compared with the same figure at the beginning, after a warm-up: the tables
have their steady size only when autovacuum and the pruner have run, and a process only when each of
its caches, threads and connections has been used once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from tests.system.soak_figures import Sample, bucket_ms

MIB = 2**20
MINUTE_S = 60.0
# The historian comes every ten minutes, and forgets keys that are no longer held: before its
# second visit no table is as large as it will be. At most a sixth of a shorter run.
WARM_UP_S, WARM_UP_SHARE = 600.0, 1 / 6
# Autovacuum comes once a minute: what is measured over less than some of its rounds tells about
# the moment and not about growth. Shorter runs print these figures, and judge them not.
SIZES_NEED_S = 600.0
SLOPES_NEED_S = 1200.0
CLAIMS_NEED_S = 180.0
RATE_NEEDS_S = 60.0

# The live table and each of its indexes are as large as what autovacuum lets pile up within its
# minute. Bloat shows as a size that goes on growing: that is a quarter more than in the first
# third, beyond a few MiB, which one hiccup of the machine makes and which then stay.
TABLE_TIMES, TABLE_SLACK_BYTES = 1.25, 4 * MIB
# The history is bought by the job. Its indexes grow in pages and its rows differ by kind.
PER_JOB_TIMES = 1.1
# So much per hour is three bytes per attempt of a worker that runs 1,000 jobs per second: less
# than any object of Python that is forgotten once per job.
RSS_MIB_PER_H = 10.0
# Of all connections' backends together: plans and the catalogue are cached once for each of them.
SERVER_MIB_PER_H = 30.0
# Descriptors, threads, connections and asyncio tasks: equal, but for one that is just being
# replaced while somebody looks.
MORE = 1
# asyncio tasks come and go with the jobs that wait: a leak of one per job would be thousands.
TASKS_TIMES, TASKS_SLACK = 1.5, 50
CLAIM_TIMES = 1.5
# Jobs that wait, run, or are due later, in seconds of the load. The load itself has some 0.15 s
# of it that is due later; a checkpoint may hold commits up for a second or two.
BACKLOG_S = 5.0
RATE_LEAST = 0.98

Take = Callable[[Sample], float]


class Line(NamedTuple):
    """A figure at the beginning, in the middle and at the end; `holds` None: it is not judged."""

    what: str
    first: float
    middle: float
    last: float
    bound: str = ""
    holds: bool | None = None


class Windows:
    """A run in thirds, after its warm-up, and its first and last minute.

    Raises:
        ValueError: there are fewer than four samples.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        if len(samples) < 4:
            raise ValueError(f"{len(samples)} samples are too few to be judged")
        self.samples = samples
        self.length_s = samples[-1].at_s
        self.warm_s = min(WARM_UP_S, self.length_s * WARM_UP_SHARE)
        third_s = (self.length_s - self.warm_s) / 3
        self.minute_s = min(MINUTE_S, third_s)
        cuts = [self.warm_s + n * third_s for n in range(4)]
        self.thirds = [self.between(*pair) for pair in pairwise(cuts)]
        middle_s = (self.warm_s + self.length_s - self.minute_s) / 2
        self.minutes = [
            self.between(from_s, from_s + self.minute_s)
            for from_s in (self.warm_s, middle_s, self.length_s - self.minute_s)
        ]
        self.second_half = self.between((self.warm_s + self.length_s) / 2, self.length_s)

    def between(self, from_s: float, to_s: float) -> list[Sample]:
        """The samples of a time, or the nearest one."""
        some = [each for each in self.samples if from_s < each.at_s <= to_s + 0.001]
        return some or [min(self.samples, key=lambda each: abs(each.at_s - to_s))]


def judge(samples: Sequence[Sample], rate: float) -> list[Line]:
    """All figures of a run at `rate` jobs per second, and the findings about them."""
    windows = Windows(samples)
    return [
        *_pace(windows, rate),
        *_sizes(windows),
        *_history(windows),
        *_processes(windows),
        *_times(windows),
    ]


def _pace(windows: Windows, rate: float) -> list[Line]:
    offered = [_per_s(some, windows, lambda s: s.offered) for some in windows.minutes]
    first, last = windows.thirds[0][0], samples_last(windows)
    passed = last.at_s - first.at_s
    whole = (last.offered - first.offered) / passed if passed else 0.0
    backlog = [max(each.backlog for each in some) for some in windows.minutes]
    most = max(each.backlog for some in windows.thirds[1:] for each in some)
    long = windows.length_s >= RATE_NEEDS_S
    deadlocks = last.deadlocks
    return [
        Line(
            "jobs offered per s", *offered, f"in all {whole:,.1f}, >= {RATE_LEAST} of {rate:,.0f}",
            whole >= RATE_LEAST * rate if long else None,
        ),
        Line(
            "jobs that live, at most", *backlog, f"{most:,} <= {BACKLOG_S * rate:,.0f}",
            most <= BACKLOG_S * rate if long else None,
        ),
        Line("deadlocks", 0, 0, deadlocks, "0", deadlocks == 0),
        Line("CPU of the server, cores", *_cores(windows, lambda s: s.cpu_s)),
        _memory(windows, "server's backends, own memory", lambda s: s.server_mib, SERVER_MIB_PER_H),
        Line("dead rows of job", *_medians(windows.minutes, lambda s: s.dead)),
    ]  # fmt: skip


def samples_last(windows: Windows) -> Sample:
    """The last measurement."""
    return windows.samples[-1]


def _sizes(windows: Windows) -> list[Line]:
    """The live table, each of its indexes, and everything else that does not grow by design."""
    tables = samples_last(windows).of_table
    flat = sorted(name for name, table in tables.items() if table == "job")
    lines = [_size(windows, name, lambda s, name=name: s.sizes.get(name, 0)) for name in flat]
    grows = {"job", "job_history", "workflow", "dependency"}
    others = [name for name, table in tables.items() if table not in grows]
    for name in sorted({tables[name] for name in others}):
        mine = [each for each in others if tables[each] == name]
        lines.append(
            _size(windows, f"{name}, all", lambda s, mine=mine: sum(s.sizes[m] for m in mine))
        )
    return lines


def _size(windows: Windows, name: str, take: Take) -> Line:
    first, middle, last = (max(take(each) for each in some) for some in windows.thirds)
    most = TABLE_TIMES * first + TABLE_SLACK_BYTES
    return Line(
        f"{name}, MiB", first / MIB, middle / MIB, last / MIB, f"<= {most / MIB:.1f}",
        last <= most if windows.length_s >= SIZES_NEED_S else None,
    )  # fmt: skip


def _history(windows: Windows) -> list[Line]:
    """What a finished job costs on the disk, and a workflow, for as long as they are kept."""
    lines = [
        Line("job_history, MiB", *_medians(windows.minutes, lambda s: s.sizes["job_history"] / MIB))
    ]
    for what, tables in (
        ("job_history", {"job_history"}),
        ("workflow and dependency", {"workflow", "dependency"}),
    ):
        names = [n for n, table in samples_last(windows).of_table.items() if table in tables]
        each = [
            _per_job(some, lambda s, names=names: sum(s.sizes[n] for n in set(names)))
            for some in windows.thirds
        ]
        # A page of a btree that splits doubles; a few bytes per job are only that.
        most = PER_JOB_TIMES * each[0] + 2.0
        lines.append(
            Line(
                f"{what}, bytes per job", *each, f"<= {most:.1f}",
                each[2] <= most if windows.length_s >= SIZES_NEED_S else None,
            )
        )  # fmt: skip
    return lines


def _processes(windows: Windows) -> list[Line]:
    lines = []
    for name in samples_last(windows).processes:
        lines += [
            _memory(
                windows, f"{name}: RSS", lambda s, n=name: s.processes[n].rss_mib, RSS_MIB_PER_H
            ),
            _same(windows, f"{name}: descriptors", lambda s, n=name: s.processes[n].descriptors),
            _same(windows, f"{name}: threads", lambda s, n=name: s.processes[n].threads),
            Line(f"{name}: CPU, cores", *_cores(windows, lambda s, n=name: s.processes[n].cpu_s)),
        ]
        if samples_last(windows).processes[name].tasks is not None:
            lines.append(
                _same(
                    windows, f"{name}: asyncio tasks",
                    lambda s, n=name: s.processes[n].tasks or 0, TASKS_TIMES, TASKS_SLACK,
                )
            )  # fmt: skip
    total: Take = lambda s: sum(s.sessions.values())  # noqa: E731 - as its neighbours
    lines.append(_same(windows, "connections of taskd", total))
    return lines


def _memory(windows: Windows, what: str, take: Take, most: float) -> Line:
    slope = 3600 * _slope((each.at_s, take(each)) for each in windows.second_half)
    return Line(
        f"{what}, MiB", *_medians(windows.minutes, take),
        f"{slope:+.1f} MiB/h in the second half, <= {most:g}",
        slope <= most if windows.length_s >= SLOPES_NEED_S else None,
    )  # fmt: skip


def _same(windows: Windows, what: str, take: Take, times: float = 1.0, slack: float = MORE) -> Line:
    first, middle, last = (max(take(each) for each in some) for some in windows.thirds)
    most = times * first + slack
    return Line(
        what, first, middle, last, f"<= {most:.0f}",
        last <= most if windows.length_s >= CLAIMS_NEED_S else None,
    )  # fmt: skip


def _times(windows: Windows) -> list[Line]:
    lines = []
    for what, take in (
        ("claim", lambda s: s.claims),
        ("wait of a job, due to claimed", lambda s: s.waits),
        ("batch enqueued", lambda s: s.enqueues),
    ):
        for share in (0.5, 0.99):
            at = [percentile((take(each) for each in some), share) for some in windows.minutes]
            lines.append(Line(f"{what}, p{share * 100:.0f}, ms", *at))
    claim = lines[1]
    holds = claim.last <= CLAIM_TIMES * claim.first if windows.length_s >= CLAIMS_NEED_S else None
    bound = f"<= {CLAIM_TIMES} of the first minute"
    lines[1] = claim._replace(bound=bound, holds=holds)
    return lines


def percentile(histograms: Iterable[dict[int, int]], share: float) -> float:
    """In milliseconds; 0 when nothing was counted."""
    counts: Counter[int] = Counter()
    for each in histograms:
        counts.update(each)
    left = share * counts.total()
    for number in sorted(counts):
        left -= counts[number]
        if left <= 0:
            return bucket_ms(number)
    return 0.0


def _slope(points: Iterable[tuple[float, float]]) -> float:
    """By least squares."""
    at = list(points)
    mean_x, mean_y = (sum(each[n] for each in at) / len(at) for n in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in at)
    return sum((x - mean_x) * (y - mean_y) for x, y in at) / spread if spread else 0.0


def _per_s(some: list[Sample], windows: Windows, take: Take) -> float:
    """From the sample before the first of them, so that a single one has a rate as well."""
    at = windows.samples.index(some[0])
    before = windows.samples[max(0, at - 1)]
    passed = some[-1].at_s - before.at_s
    return (take(some[-1]) - take(before)) / passed if passed else 0.0


def _cores(windows: Windows, take: Take) -> list[float]:
    return [_per_s(some, windows, take) for some in windows.minutes]


def _per_job(some: list[Sample], take: Take) -> float:
    jobs = some[-1].finished - some[0].finished
    return (take(some[-1]) - take(some[0])) / jobs if jobs else 0.0


def _medians(windows: list[list[Sample]], take: Take) -> list[float]:
    return [median(take(each) for each in some) for some in windows]


def table(lines: Sequence[Line]) -> str:
    """For a terminal, and for a page."""
    head = ("Figure", "First minute", "Middle", "Last minute", "Bound", "")
    verdicts = {True: "holds", False: "BROKEN", None: ""}
    rows = [
        (line.what, *map(_number, line[1:4]), line.bound,
         "not judged, the run is too short" if line.bound and line.holds is None
         else verdicts[line.holds])
        for line in lines
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (head, tuple("-" * width for width in widths), *rows)
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"
