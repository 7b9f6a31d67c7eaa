"""`taskd top`: queues, workers and jobs, live in the terminal."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.shared.name_hints import hint_unknown
from taskd.cli.shared.output import print_json
from taskd.cli.shared.refreshing import Asking, watching
from taskd.cli.shared.session import QUEUE, Session, json_option, pass_session, run
from taskd.cli.shared.terminal import STYLES, Terminal, can_show
from taskd.cli.top.screen import SORTS, Ui, screen, sorted_queues
from taskd.core.watching.top import LATE_S, Top, View

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane

# The time between the first two polls, from which the first rates are computed.
FIRST_S = 1.0
# Each poll also reads the jobs that ended within this time before the last poll. An ack sets the
# end time of the job. But the ack becomes visible only when its transaction commits, perhaps after
# the last poll.
OVERLAP_S = 5.0
TICK_S = 1.0
# Size of the screen with --once if stdout is not a terminal.
PLAIN_SIZE = (120, 60)


class Interval(click.FloatRange):
    """Seconds, or a duration."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the duration in seconds."""
        from taskd.cli.shared.session import DURATION

        return super().convert(DURATION.convert(value, param, ctx), param, ctx)


interval_option = click.option(
    "--interval",
    "interval_s",
    type=Interval(0.2, 3600),
    default="2s",
    show_default=True,
    help="How often to poll.",
)


@click.command()
@interval_option
@click.option("--queue", type=QUEUE, help="Only this queue.")
@click.option("--once", is_flag=True, help="Print one screen, and end.")
@json_option
@pass_session
def top(session: Session, /, as_json: bool, **options: Any) -> None:
    """Watch queues, workers, running jobs, failing tasks and full limits, live.

    Keys: q quits, h shows all keys. Rates are those of the last 10 s; wait and run times are those
    of jobs that ended within the last minute. If stdout is not a terminal, give --once or --json;
    --json prints one object per interval. The role taskd_observer is enough for this command.
    """
    if not (options["once"] or as_json or can_show()):
        raise click.UsageError(
            "stdout is not a terminal that can show screens; use --once or --json"
        )
    with suppress(KeyboardInterrupt):
        run(_top(session, as_json=as_json, **options))


async def _top(
    session: Session, interval_s: float, queue: str | None, once: bool, as_json: bool
) -> None:
    async with watching(session, "top") as lane:
        await hint_unknown(session, lane, queue=queue)
        polls = Polls(lane, interval_s)
        await polls.poll()  # an error here ends the command; later errors are shown
        if as_json:
            await _print_views(session, polls, queue, once=once)
        elif once:
            await asyncio.sleep(min(FIRST_S, interval_s))
            await polls.poll()
            _print_screen(polls, queue)
        else:
            await Live(polls, lane, queue).run()


class Polls:
    """Polls the database, and keeps the results.

    Attributes:
        refreshing: the interval, and the state of the connection.
        top: the results, from which view() is computed.
    """

    def __init__(self, lane: Lane, interval_s: float) -> None:
        self.refreshing = Asking(interval_s)
        self.top = Top()
        self._lane = lane
        self._last_s: float | None = None

    async def poll(self) -> None:
        """Poll once, with two statements.

        Raises:
            StoreUnavailable: the database does not answer now.
        """
        from taskd.store.reading import watching as store

        state = await store.state(self._lane, self.top.last_id)
        since_s = LATE_S
        if self._last_s is not None:
            since_s = min(LATE_S, state.now_s - self._last_s + OVERLAP_S)
        ended = await store.ended(self._lane, max(since_s, OVERLAP_S), self.top.seen_running())
        self.top.add(state, ended)
        self._last_s = state.now_s

    async def __call__(self) -> bool:
        """Poll; return whether the database has answered. If it has not, wait before returning."""

        async def poll() -> bool:
            await self.poll()
            return True

        return bool(await self.refreshing(poll))

    def view(self, queue: str | None) -> View:
        """Return the contents of the screen."""
        return self.top.view(queue)


async def _print_views(session: Session, polls: Polls, queue: str | None, *, once: bool) -> None:
    """Print one object per interval, from the second poll on: rates need two polls."""
    failing = False
    while True:
        await asyncio.sleep(FIRST_S if once else polls.refreshing.rest_s())
        if await polls():
            failing = False
            print_json(polls.view(queue))
            if once:
                return
        elif not failing:
            failing = True
            session.echo(f"taskd: {polls.refreshing.error}; retrying")


def _print_screen(polls: Polls, queue: str | None) -> None:
    width, height = PLAIN_SIZE
    if sys.stdout.isatty():
        width, height = shutil.get_terminal_size()
    ui = Ui(polls.refreshing.interval_s, only=queue)
    lines = screen(polls.view(queue), ui, width, height)[:-1]
    while lines and not lines[-1]:
        lines.pop()
    for line in lines:
        parts = [_echoed(text, style) for text, style in line]
        click.echo("".join(parts) if sys.stdout.isatty() else "".join(t for t, _ in line).rstrip())


def _echoed(text: str, style: str) -> str:
    codes = STYLES[style]
    return (
        f"\x1b[{codes}m{text}\x1b[0m"
        if codes and click.get_current_context().color is not False
        else text
    )


class Live:
    """The interactive screen."""

    def __init__(self, polls: Polls, lane: Lane, queue: str | None) -> None:
        self._polls = polls
        self._lane = lane
        self._ui = Ui(polls.refreshing.interval_s, only=queue)
        self._view: View | None = None
        self._ended = asyncio.Event()
        # Events of the terminal: keys, or an empty text to redraw the screen.
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._terminal: Terminal | None = None

    async def run(self) -> None:
        """Show the screen until the user quits."""
        on_key = self._keys.put_nowait
        with Terminal(on_key, lambda: on_key(""), self._ended.set) as self._terminal:
            self._see()
            tasks = [
                asyncio.create_task(self._poll_on(), name="top:look"),
                asyncio.create_task(self._tick(), name="top:tick"),
                asyncio.create_task(self._listen(), name="top:listen"),
                asyncio.create_task(self._ended.wait(), name="top:end"),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
            finally:
                # Close the connection first: a cancelled task would wait for its statement.
                await self._lane.close()
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll_on(self) -> None:
        await asyncio.sleep(min(FIRST_S, self._ui.interval_s))
        while True:
            if await self._polls():
                self._see()
                await asyncio.sleep(self._polls.refreshing.rest_s())
            self._draw()

    async def _listen(self) -> None:
        while True:
            self._pressed(await self._keys.get())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._draw()

    def _see(self) -> None:
        if not self._ui.held:
            self._view = self._polls.view(self._ui.only)
        self._draw()

    def _draw(self) -> None:
        if self._terminal is not None:
            width, height = self._terminal.size()
            self._ui = self._ui._replace(status=self._polls.refreshing.status())
            self._terminal.show(screen(self._view, self._ui, width, height))

    def _pressed(self, key: str) -> None:
        ui = self._ui
        if key == "q":
            self._ended.set()
        elif key in ("h", "?") or (key and ui.help):
            self._ui = ui._replace(help=not ui.help)
        elif key == "space":
            self._ui = ui._replace(held=not ui.held)
        elif key == "s":
            self._ui = ui._replace(sort=SORTS[(SORTS.index(ui.sort) + 1) % len(SORTS)])
        elif key in ("up", "down", "k", "j"):
            self._ui = ui._replace(chosen=self._neighbour(-1 if key in ("up", "k") else 1))
        elif key == "enter":
            self._ui = ui._replace(only=ui.chosen if ui.only is None else None)
            self._refresh()
        elif key == "escape":
            self._ui = ui._replace(only=None, chosen=None)
            self._refresh()
        if key == "space":
            self._see()
        else:
            self._draw()

    def _refresh(self) -> None:
        """Show the last results for the chosen queue, even while the screen is held."""
        self._view = self._polls.view(self._ui.only)

    def _neighbour(self, step: int) -> str | None:
        names = (
            [each.queue for each in sorted_queues(self._view, self._ui.sort)] if self._view else []
        )
        if not names:
            return None
        if self._ui.chosen not in names:
            return names[0 if step > 0 else -1]
        return names[max(0, min(len(names) - 1, names.index(self._ui.chosen) + step))]
