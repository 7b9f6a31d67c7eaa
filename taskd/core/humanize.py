"""Words for people, as the command line and the pages write them: spans, moments, counts, rates."""

from __future__ import annotations

from datetime import datetime

# A unit and its seconds, and the unit below with its own.
UNITS = (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1))
# Seconds of the units of a rate.
UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def printable(text: str) -> str:
    """Text that cannot steer the terminal; line ends and tabs stay."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def moment(value: datetime | None) -> str:
    """A point in time, in the zone of the reader."""
    return "" if value is None else value.astimezone().isoformat(sep=" ", timespec="seconds")


def clock(value: datetime) -> str:
    """The time of the day in the zone of the reader, to the millisecond; see zone()."""
    return value.astimezone().strftime("%H:%M:%S.%f")[:-3]


def zone(value: datetime) -> str:
    """The zone of the reader then, `+02:00`: said once where times of the day follow."""
    return value.astimezone().isoformat(timespec="seconds")[-6:]


def given_up(beat_ago_s: float | None, lease_s: float | None, lease_until: datetime | None) -> str:
    """What becomes of a worker whose beat is late."""
    return (
        f"last beat {span(beat_ago_s)} ago; without another beat it is given up {span(lease_s)} "
        f"after that one, at about {moment(lease_until)}"
    )


def span(seconds: float | None) -> str:
    """A length of time in its two largest units: `850ms`, `12s`, `3m 5s`, `2h 10m`, `4d 3h`."""
    if seconds is None:
        return ""
    if seconds < 0:
        return "-" + span(-seconds)
    if seconds < 0.9995:  # from there on three digits would be written 1e+03
        return f"{max(seconds * 1000, 0.001):.3g}ms" if seconds else "0s"
    if seconds < 10:
        return f"{seconds:.1f}s".replace(".0s", "s")
    whole = round(seconds)
    for unit, size, below, part in UNITS:
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"


def count(number: int, noun: str) -> str:
    """`1 job`, `2,000 jobs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rate_text(rate: float | None, burst: int | None = None) -> str:
    """`100/s, burst 20`; nothing without a rate."""
    if rate is None:
        return ""
    unit = "s" if rate >= 1 else "m" if rate * 60 >= 1 else "h"
    return f"{rate * UNIT_S[unit]:g}/{unit}" + (f", burst {burst}" if burst is not None else "")
