"""`taskd limits`: how many jobs run at the same time, and how many start in a period of time."""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import click

from taskd.cli.shared.output import Row, print_json, print_rows, text_of
from taskd.cli.shared.session import Session, json_option, pass_session
from taskd.core.humanize import UNIT_S, rate_text
from taskd.core.jobs.limit import BURST_MAX, CONCURRENCY_MAX, RATE_MAX, RATE_MIN
from taskd.errors import LimitNotFound

KEYS_MAX = 1000
N = TypeVar("N")
NONE = "none"
RATE = re.compile(r"(\d+(?:\.\d+)?)/(s|m|h)")


class OrNone(click.ParamType[Any], Generic[N]):
    """A value, or a word that removes the bound: `none`, or the `word` of the option."""

    def __init__(self, inner: click.ParamType[N], word: str = NONE) -> None:
        self._inner, self._word = inner, word
        self.name = inner.name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> N | str:
        """Return the value, or `none`."""
        return NONE if value in (self._word, NONE) else self._inner.convert(value, param, ctx)


class Rate(click.ParamType[float]):
    """Jobs per second, written `100/s`, `30/m`, `5/h`."""

    name = "rate"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the rate in jobs per second."""
        if isinstance(value, float):
            return value
        match = RATE.fullmatch(str(value))
        rate = float(match[1]) / UNIT_S[match[2]] if match else 0.0
        if not RATE_MIN <= rate <= RATE_MAX:
            self.fail(f"{value!r} is not a rate. Write for example 100/s, 30/m or 5/h", param, ctx)
        return rate


def number(most: int, word: str = NONE) -> OrNone[int]:
    """Return a type for options: a whole number from 1 to `most`, or `word`."""
    return OrNone(click.IntRange(1, most), word)


def bounds(**given: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the options, and the names of the bounds to remove.

    The value `none`, which removes a bound, becomes None.

    Raises:
        UsageError: no option was given.
    """
    if all(value is None for value in given.values()):
        raise click.UsageError(
            f"give one of {', '.join('--' + n.replace('_', '-') for n in given)}"
        )
    without = [name for name, value in given.items() if value == NONE]
    return {name: None if value == NONE else value for name, value in given.items()}, without


def _rate(row: Row) -> str:
    return rate_text(row["rate"], row["burst"])


def _from(row: Row) -> str:
    if row["by_hand"]:
        return "by hand"
    return f"app {row['app']}" if row["known"] else "not published"


COLUMNS = {
    "LIMIT": text_of("name"),
    "PER KEY": text_of("concurrency"),
    "IN ALL": text_of("concurrency_in_all"),
    "RATE": _rate,
    "RUNNING": text_of("running"),
    "QUEUED": text_of("queued"),
    "NEXT": text_of("next"),
    "PARKED": text_of("parked"),
    "BLOCKED": text_of("blocked"),
    "FROM": _from,
    "TASKS": text_of("tasks"),
}


def _tokens(row: Row) -> str:
    return "" if row["tokens"] is None else f"{row['tokens']:.1f}"


KEY_COLUMNS = {
    "KEY": text_of("key"),
    "RUNNING": text_of("running"),
    "QUEUED": text_of("queued"),
    "NEXT": text_of("next"),
    "PARKED": text_of("parked"),
    "BLOCKED": text_of("blocked"),
    "TOKENS": _tokens,
}

rate_option = click.option(
    "--rate",
    type=OrNone(Rate()),
    help="Jobs that can start per second, minute or hour: 100/s, 30/m, 5/h; `none`: no limit.",
)
burst_option = click.option(
    "--burst",
    type=click.IntRange(1, BURST_MAX),
    help="Jobs that can be admitted together after an idle time; by default the rate in jobs "
    "per second, rounded up.",
)


@click.group()
def limits() -> None:
    """List limits and change them while workers run."""


@limits.command("list")
@json_option
@pass_session
def list_(session: Session, as_json: bool) -> None:
    """List limits: their bounds, the running jobs and the blocked jobs.

    QUEUED jobs are admitted and have not started. BLOCKED jobs are not admitted. Of these,
    NEXT jobs hold a slot of their key and wait for a slot of the limit IN ALL. PARKED jobs wait for
    a slot or a token of their key. The other BLOCKED jobs have not been checked yet.
    """
    from taskd.store.jobs import limits as store

    print_rows(session.run(store.list_limits), COLUMNS, as_json=as_json)


@limits.command()
@click.argument("name")
@click.option(
    "--limit",
    "keys_max",
    type=click.IntRange(1, KEYS_MAX),
    default=20,
    show_default=True,
    help="Show at most this many keys.",
)
@json_option
@pass_session
def show(session: Session, name: str, keys_max: int, as_json: bool) -> None:
    """Show a limit and its keys; the keys with the most blocked jobs come first.

    The columns are those of `taskd limits list`. A key without a job is not listed.
    """
    from taskd.store.jobs import limits as store

    found = [row for row in session.run(store.list_limits) if row["name"] == name]
    if not found:
        raise LimitNotFound(f"no limit is named {name!r}. List limits: taskd limits list")
    keys = session.run(lambda lane: store.list_keys(lane, name, keys_max))
    if as_json:
        print_json(found[0] | {"keys": keys})
        return
    print_rows(found, COLUMNS, as_json=False)
    if keys:
        click.echo()
        print_rows(keys, KEY_COLUMNS, as_json=False)


@limits.command("set")
@click.argument("name")
@click.option(
    "--concurrency",
    type=number(CONCURRENCY_MAX),
    help="Most running jobs per key; `none`: no limit.",
)
@click.option(
    "--in-all",
    "in_all",
    type=number(CONCURRENCY_MAX),
    help="Most running jobs of all keys; `none`: no limit.",
)
@rate_option
@burst_option
@json_option
@pass_session
def set_(
    session: Session,
    name: str,
    concurrency: int | str | None,
    in_all: int | str | None,
    rate: float | str | None,
    burst: int | None,
    as_json: bool,
) -> None:
    """Change a limit. Bounds that are not given do not change.

    The new bounds stay in force when the app restarts. Running jobs continue. Blocked jobs are
    admitted immediately if the new bounds allow that.
    """
    from taskd.core.jobs.job import check_task_name
    from taskd.store.jobs import limits as store

    check_task_name(name)
    given, without = bounds(
        concurrency=concurrency, concurrency_in_all=in_all, rate=rate, burst=burst
    )
    row = session.run(lambda lane: store.set_limit(lane, name, **given, without=without))
    if not any(each["name"] == name and each["tasks"] for each in session.run(store.list_limits)):
        session.echo(f"no published task has the limit {name} yet. List limits: taskd limits list")
    if as_json:
        print_json(row)
        return
    print_rows(
        [row],
        {name: COLUMNS[name] for name in ("LIMIT", "PER KEY", "IN ALL", "RATE")},
        as_json=False,
    )


@limits.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@json_option
@pass_session
def clear(session: Session, names: tuple[str, ...], as_json: bool) -> None:
    """Undo `taskd limits set`: the bounds in the code of the app apply again."""
    from taskd.store.jobs import limits as store

    cleared = session.run(lambda lane: store.clear(lane, names))
    if as_json:
        print_json({"cleared": cleared, "not_set": sorted(set(names) - set(cleared))})
        return
    for name in dict.fromkeys(names):
        session.echo(f"cleared: {name}" if name in cleared else f"was not set by hand: {name}")
