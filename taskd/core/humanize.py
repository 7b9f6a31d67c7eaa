"""Format durations, moments, counts and rates for people."""

from __future__ import annotations

import shlex
from datetime import datetime

# Each unit with its length in seconds, and the next smaller unit with its length.
UNITS = (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1))
# The units of time in which a rate is shown, each with its seconds.
UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


def printable(text: str) -> str:
    """Return the text with control characters escaped, except line ends and tabs.

    Some of these characters steer a terminal (ESC, BEL, U+009B) or change the direction of a text
    (U+202E). Some programs read others as the end of a line (U+2028).
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )


def printable_json(written: str) -> str:
    """Return JSON in one line, with the characters that printable() escapes escaped as in JSON."""
    if written.isprintable():
        return written
    import json

    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in written)


def cut_text(text: str, chars_max: int) -> str:
    """Return the text, cut to `chars_max`; a last line then counts the characters that were cut."""
    more = len(text) - chars_max
    return text if more <= 0 else f"{text[:chars_max]}\n… and {count(more, 'more character')}"


def moment(value: datetime | None) -> str:
    """Return a date and time in the local time zone."""
    return "" if value is None else value.astimezone().isoformat(sep=" ", timespec="seconds")


def clock(value: datetime) -> str:
    """Return the time of day in the local time zone, with milliseconds; see zone()."""
    return value.astimezone().strftime("%H:%M:%S.%f")[:-3]


def zone(value: datetime) -> str:
    """Return the local UTC offset at that time, such as `+02:00`.

    The text of clock() does not contain the offset.
    """
    return value.astimezone().isoformat(timespec="seconds")[-6:]


def worker_text(host: str, pid: int | None, name: str | None = None) -> str:
    """Return how a sentence names a worker: `mailer on web-3 (pid 77)`, or `web-3 (pid 77)`."""
    place = f"{printable(host)} (pid {pid})"
    return f"{printable(name)} on {place}" if name else place


def worker_label(host: str, pid: int | None, name: str | None) -> str:
    """Return how a column of a table names a worker: `mailer@web-3:77`, or `web-3:77`."""
    return f"{name}@{host}:{pid}" if name else f"{host}:{pid}"


def given_up(
    renewed_ago_s: float | None, lease_s: float | None, lease_until: datetime | None
) -> str:
    """Say when a late worker has renewed its lease, and when the lease expires.

    Returns:
        The predicate of a sentence about the worker.
    """
    return (
        f"renewed its lease {span(renewed_ago_s)} ago; the lease of {span(lease_s)} "
        f"expires at about {moment(lease_until)}"
    )


def span(seconds: float | None) -> str:
    """Return a duration in its two largest units: `850ms`, `12s`, `3m 5s`, `2h 10m`, `4d 3h`."""
    if seconds is None:
        return ""
    if seconds < 0:
        return "-" + span(-seconds)
    if seconds < 0.9995:  # from here on, three significant digits would be printed as 1e+03ms
        return f"{max(seconds * 1000, 0.001):.3g}ms" if seconds else "0s"
    if seconds < 10:
        return f"{seconds:.1f}s".replace(".0s", "s")
    whole = round(seconds)
    for unit, size, below, part in UNITS:
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"


def restart_hung(task: str, running_s: float) -> str:
    """Return the command that restarts the attempts of a task that have run for this long.

    The bound is rounded down to its largest unit, and is never below a second: `45s`, `3m`, `2h`.
    """
    whole = max(1, int(running_s))
    size, unit = next(((size, unit) for unit, size, *_ in UNITS if whole >= size), (1, "s"))
    return f"taskd jobs restart --task {shlex.quote(task)} --running-for {whole // size}{unit}"


def count(number: int, noun: str) -> str:
    """Return `1 job`, `2,000 jobs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rate_text(rate: float | None, burst: int | None = None) -> str:
    """Format a rate, given in jobs per second: `100/s, burst 20`, or an empty text for None."""
    if rate is None:
        return ""
    unit = "s" if rate >= 1 else "m" if rate * 60 >= 1 else "h"
    return f"{rate * UNIT_S[unit]:g}/{unit}" + (f", burst {burst}" if burst is not None else "")
