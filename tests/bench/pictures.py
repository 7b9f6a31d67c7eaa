"""Pictures of S1, S6 and S8 as SVG: for light and dark pages, the same bytes every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.rows import Rows

# Mid-grey has a contrast of 4 and more against white and black; the background is the page's.
INK = "#7d828a"
OURS = "#2f81f7"
HAND_WRITTEN = "#b08800"
PEERS = ("#3fa45b", "#c2569b", "#8a63d2", "#d9663f", "#4a9ea8", "#9c8a5a")
STYLE = {
    "svg.hashsalt": "taskd",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.transparent": True,
}
S8_KINDS = {
    "plain": "the same row\nby INSERT",
    "function": "by a function\nwith an INSERT",
    "taskd": "taskd.enqueue",
    "raw_insert": "hand-written\nINSERT",
    "raw_notify": "hand-written\n+ pg_notify",
    "graphile": "graphile_worker\n.add_job",
}


def draw(rows: Rows, folder: Path) -> list[Path]:
    """Draw what there are rows for; the files made.

    Raises:
        ImportError: matplotlib is missing (the extra `bench` brings it).
    """
    made = []
    for name, scenario, paint in (
        ("s1.svg", "s1", _s1), ("s6.svg", "held", _s6), ("s8.svg", "producers", _s8)
    ):  # fmt: skip
        if rows.of(scenario):
            with _figure(folder / name) as axes:
                paint(rows, axes)
            made.append(folder / name)
    return made


@contextmanager
def _figure(path: Path) -> Iterator[Any]:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.4, 4.4), layout="constrained")
        yield axes
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata)
        plt.close(figure)


def _s1(rows: Rows, axes: Any) -> None:
    """Bars: jobs per second of each peer with one worker process, the fastest on top."""
    names = {row["peer"] for row in rows.of("s1", {"procs": 1})}
    rates = {
        name: figure.value
        for name in names
        if (figure := rows.median("s1", "rate", peer=name, procs=1))
    }
    ranked = sorted(rates, key=lambda name: (rates[name], name))
    bars = axes.barh(
        [_label(name) for name in ranked],
        [rates[name] for name in ranked],
        color=[_colour(name) for name in ranked],
    )
    axes.bar_label(bars, labels=[f"{rates[name]:,.0f}" for name in ranked], padding=4, color=INK)
    axes.set_title("S1: no-op jobs per second, one worker process")
    axes.set_xlim(0, max(rates.values()) * 1.12)
    axes.locator_params(axis="x", nbins=6)
    _plain_numbers(axes.xaxis)
    axes.grid(visible=False, axis="y")


def _s6(rows: Rows, axes: Any) -> None:
    """Curves: the rate second by second while a snapshot is held; medians of the repetitions."""
    names = dict.fromkeys(row["peer"] for row in rows.of("held", {"hold": True}))
    for place, name in enumerate(sorted(names, key=lambda each: each != "taskd")):
        runs = [row["windows"] for row in rows.of("held", {"peer": name, "hold": True})]
        length = min(map(len, runs))
        smooth = [
            sum(median(run[at] for run in runs) for at in range(max(0, end - 2), end + 1))
            / min(end + 1, 3)
            for end in range(length)
        ]
        axes.plot(
            range(1, length + 1), smooth, label=_label(name), color=_colour(name, place),
            linewidth=2.4 if name == "taskd" else 1.6,
        )  # fmt: skip
    axes.set_title("S6: jobs per second while another session holds a snapshot")
    axes.set_xlabel("seconds since the first job (mean of three)")
    axes.set_ylim(bottom=0)
    _plain_numbers(axes.yaxis)
    axes.figure.legend(loc="outside lower center", ncols=4)


def _s8(rows: Rows, axes: Any) -> None:
    """Pairs of bars: commits per second with one worker, and with three idle ones more."""
    kinds = [kind for kind in S8_KINDS if rows.of("producers", {"kind": kind})]
    for place, idle in enumerate((0, 3)):
        found = [rows.median("producers", "tps", kind=kind, idle=idle) for kind in kinds]
        values = [figure.value if figure else 0.0 for figure in found]
        bars = axes.bar(
            [at + (place - 0.5) * 0.4 for at in range(len(kinds))], values, width=0.38,
            color=[_colour(kind) for kind in kinds], alpha=1.0 if not idle else 0.55,
        )  # fmt: skip
        axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=2, color=INK)
    axes.set_xticks(range(len(kinds)), [S8_KINDS[kind] for kind in kinds])
    axes.set_title(
        "S8: commits per second of 16 clients; full colour: one busy worker, pale: 3 idle ones more"
    )
    _plain_numbers(axes.yaxis)
    axes.grid(visible=False, axis="x")


def _label(name: str) -> str:
    if name.startswith("raw"):
        return "hand-written SQL"
    return name.replace("_", " ")


def _colour(name: str, place: int = 1) -> str:
    if name == "taskd":
        return OURS
    if name.startswith(("raw", "plain")):
        return HAND_WRITTEN
    return PEERS[place % len(PEERS)]


def _plain_numbers(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _place: f"{value:,.0f}")
