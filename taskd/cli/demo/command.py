"""`taskd demo`: a demonstration that needs no set-up and sends no mail to other machines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from taskd import events
from taskd.cli import typed
from taskd.cli.demo.mail_sink import HOST, MARKER, Folder, serving
from taskd.cli.shared.session import Session, pass_session
from taskd.cli.shared.windows import refuse_windows
from taskd.core.jobs.backoff import Fixed
from taskd.core.jobs.job import NewJob
from taskd.core.tasks.registry import Registry
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from taskd.client import Target
    from taskd.config import Settings
    from taskd.store.connections.lanes import Lane
    from taskd.store.reading.demo import LeftJob, Outcome

QUEUE = "email"
MAILS = Path(__file__).with_name("demo_mails.ndjson")
# Each mail of the demo names its folder in this header. If a run is killed, its undelivered mails
# stay in the queue. The next run reads this header. Unless --dir is given, that run delivers all
# mails into the same folder, if that folder still exists.
FOLDER_HEADER = "X-Demo-Folder"
SENDER = "The taskd demo <demo@example.org>"
RETRY_S = 0.5
BATCH = 1000
PROGRESS_EVERY_S = 0.2
LOOK_EVERY_S = 1.0


@click.command()
@click.option(
    "--jobs",
    type=click.IntRange(1, 1_000_000),
    default=1000,
    show_default=True,
    help="Mails to enqueue.",
)
@click.option("--until-empty", is_flag=True, help="Exit when no mail is left in the queue.")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="Mails to send at the same time.  [default: 100]",
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for delivered mails; a new one by default.",
)
@click.option(
    "--fail-rate",
    type=click.FloatRange(0.0, 1.0),
    default=0.02,
    show_default=True,
    help="Share of attempts that the mail server defers, to show retries.",
)
@pass_session
def demo(session: Session, /, **options: Any) -> None:
    """Run a demonstration that needs no set-up.

    The demo starts PostgreSQL (unless a DSN is configured), its own mail server and a worker. It
    enqueues mails to fictional people, and delivers the mails into a folder. No mail leaves this
    machine. Kill the demo half-way and run it again: it delivers the rest.
    """
    refuse_windows("demo")
    import uvloop

    raise SystemExit(uvloop.run(_demo(session, **options)))


async def _demo(
    session: Session,
    jobs: int,
    until_empty: bool,
    concurrency: int | None,
    folder: Path | None,
    fail_rate: float,
) -> int:
    from taskd.store.reading import demo as stored
    from taskd.store.reading.reports import count_serving
    from taskd.store.schema import migrations

    settings = session.load(concurrency=concurrency).settings
    events.configure(settings.log_format, settings.log_level if session.verbose else "error")
    async with session.target(waits=False) as target, _lane(target) as lane:
        await migrations.check(target.database)
        left = await stored.left(lane, QUEUE)
        _refuse_to_divert(left, settings, target)
        kept = _folder(folder, left)
        async with serving(kept, fail_rate) as port:
            run = Run(session, kept, [job.id for job in left if job.folder], fail_rate)
            run.introduce(target, port, await count_serving(lane, QUEUE))
            run.ids += await _enqueue(lane, _mails(jobs, kept.path))
            return await run.work(_demo_settings(settings, port), target, lane, until_empty)


@asynccontextmanager
async def _lane(target: Target) -> AsyncIterator[Lane]:
    from taskd.store.connections.lanes import Lane

    lane = Lane(target.database, "demo")
    try:
        yield lane
    finally:
        await lane.close()


def _refuse_to_divert(left: Sequence[LeftJob], settings: Settings, target: Target) -> None:
    """Check that the queue contains no mails of an app, because the demo would deliver them.

    The check accepts mails in the embedded PostgreSQL while `smtp_host` is not set. It assumes that
    a user who tries the demo enqueued them.

    Raises:
        ConfigError: the queue contains mails of an app.
    """
    others = sum(job.folder is None and job.task == "send_email" for job in left)
    if others and (target.embedded is None or settings.smtp_host is not None):
        raise ConfigError(
            f"the queue {QUEUE} contains {others} mails of another app, and the demo would deliver "
            "them into its folder. Let a worker send them first, or give the demo another database."
        )


def _folder(given: Path | None, left: Sequence[LeftJob]) -> Folder:
    """Return the folder for mails: the given folder, that of an earlier run, or a new folder."""
    earlier = [Path(job.folder) for job in left if job.folder]
    path = given or next((each for each in earlier if (each / MARKER).is_file()), None)
    try:
        return Folder((path or Path(tempfile.mkdtemp(prefix="taskd-demo-"))).absolute())
    except OSError as error:
        raise ConfigError(f"the folder for the mails cannot be used: {error}") from None


def _mails(count: int, folder: Path) -> Iterator[NewJob]:
    """Yield `count` jobs, made from the shipped mails in turn."""
    shipped = MAILS.read_text(encoding="utf-8").splitlines()
    mark = str(folder).encode("ascii", "backslashreplace").decode()
    for number in range(1, count + 1):
        text = shipped[(number - 1) % len(shipped)].replace("{number}", str(number))
        args = msgspec.json.decode(text, type=dict[str, Any])
        args["headers"] = args.get("headers", {}) | {FOLDER_HEADER: mark}
        yield NewJob("send_email", msgspec.json.encode(args).decode(), queue=QUEUE)


async def _enqueue(lane: Lane, mails: Iterator[NewJob]) -> list[int]:
    from taskd.store.jobs.jobs import enqueue

    ids: list[int] = []
    while batch := list(islice(mails, BATCH)):
        ids += await enqueue(lane, batch)
    return ids


def _demo_settings(settings: Settings, port: int) -> Settings:
    return replace(
        settings,
        queues=(QUEUE,),
        smtp_host=HOST,
        smtp_port=port,
        smtp_tls="off",
        smtp_user=None,
        smtp_password=None,
        smtp_sender=SENDER,
    )


class Run:
    """One run of the demo: delivers mails, and prints what happens."""

    def __init__(
        self, session: Session, folder: Folder, left: Sequence[int], fail_rate: float
    ) -> None:
        self.ids = list(left)
        self._session = session
        self._folder = folder
        self._left = len(left)
        self._fail_rate = fail_rate
        self._counts: Counter[str] = Counter()
        self._summarized = False

    def introduce(self, target: Target, port: int, others: int) -> None:
        """Print the database, the mail server and the folder."""
        echo = self._session.echo
        echo(f"database      {target.describe()}")
        echo(f"mail server   the demo's own, {HOST}:{port}; no mail leaves this machine")
        echo(f"mails go to   {self._folder.path}")
        if self._left:
            echo(f"first         {self._left:,} mails that an earlier run left in the queue")
        elif others:
            echo(
                f"note          another worker serves the queue {QUEUE}, too, and delivers the "
                "mails that it claims"
            )

    async def work(self, settings: Settings, target: Target, lane: Lane, until_empty: bool) -> int:
        """Deliver the mails, show the progress and print a summary; return the exit code."""
        from taskd.core.tasks.registry import BUILT_IN_APP
        from taskd.tasks.send_email import Mailer
        from taskd.worker import Worker

        mailer = Mailer(settings)
        registry = Registry()
        registry.add_built_in(mailer.task(backoff=Fixed(RETRY_S)))
        worker = Worker(
            settings,
            registry,
            target.database,
            app=BUILT_IN_APP,
            until_empty=until_empty,
            on_close=[mailer.aclose],
        )
        unsubscribe = events.subscribe(self._listen)
        watching = [asyncio.create_task(self._show_progress(), name="demo:progress")]
        if not until_empty:
            watching.append(asyncio.create_task(self._await_all(lane), name="demo:await-all"))
        try:
            code = await worker.run()
        finally:
            unsubscribe()
            for each in watching:
                each.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        if self._summarized:
            self._session.echo(f"\n{self._folder.copies.total():,} mails in {self._folder.path}")
        else:
            await self._sum_up(lane)
        return code

    def _listen(self, name: str, _fields: Mapping[str, Any]) -> None:
        self._counts[name] += 1
        if name == "acks.delayed":
            self._session.echo(
                "\nPostgreSQL does not answer; the worker writes the outcomes later."
            )
        elif name == "store.back":
            self._session.echo("\nPostgreSQL answers again.")

    async def _show_progress(self) -> None:
        """Show a progress line on a terminal."""
        while sys.stderr.isatty() and not self._session.quiet:
            done, retried = self._counts["job.done"], self._counts["job.retried"]
            line = f"\r{done:,} of {len(self.ids):,} delivered, {retried:,} retried"
            if not self._summarized:
                click.echo(line, err=True, nl=False)
            await asyncio.sleep(PROGRESS_EVERY_S)

    async def _await_all(self, lane: Lane) -> None:
        """Print the summary when all mails are delivered; the worker continues to run."""
        from taskd.errors import StoreUnavailable
        from taskd.store.reading import demo as stored

        live = len(self.ids)
        while live:
            await asyncio.sleep(LOOK_EVERY_S)
            with contextlib.suppress(StoreUnavailable):
                live = await stored.live(lane, self.ids)
        self._summarized = True
        await self._sum_up(lane)
        self._session.echo(
            "\nThe worker is still running. Send a mail of your own from a second shell,\n"
            "  taskd enqueue send_email to=you@example.org subject=Hello body='It works.'\n"
            f"and read the newest file in {self._folder.path}. Ctrl-C ends the demo."
        )

    async def _sum_up(self, lane: Lane) -> None:
        from taskd.errors import StoreUnavailable
        from taskd.store.reading import demo as stored

        if sys.stderr.isatty():
            self._session.echo("")
        try:
            outcome = await stored.outcome(lane, self.ids)
        except StoreUnavailable:
            click.echo(f"delivered     {len(self._folder.copies):,} mails in {self._folder.path}")
            click.echo("left          PostgreSQL does not answer; run the demo again for the rest")
            return
        for line in self._summary(outcome):
            click.echo(typed(line))

    def _summary(self, outcome: Outcome) -> Iterator[str]:
        yield f"jobs          {_jobs_line(outcome, len(self.ids))}"
        if self._left:
            yield f"              {self._left:,} of them from an earlier run"
        if outcome.span_s:
            speed = (outcome.done + outcome.failed) / outcome.span_s
            yield f"speed         {speed:,.0f} jobs/s ({outcome.span_s:.2f} s)"
        if outcome.wait_s:
            p50, p95 = (1000 * wait for wait in outcome.wait_s)
            since = (
                "some mails have waited since an earlier run"
                if self._left
                else "all mails were enqueued before the demo's worker started"
            )
            yield f"wait          p50 {p50:,.0f} ms, p95 {p95:,.0f} ms; {since}"
        killed = "; a killed run costs each mail in progress one attempt" if self._left else ""
        rate = f"the mail server defers {self._fail_rate:.1%}"
        yield f"retries       {outcome.retries:,}; {rate}{killed}"
        sent = set(outcome.message_ids or ())
        here = sum(each in self._folder.copies for each in sent)
        again = self._folder.duplicates
        yield f"delivered     {here:,} mails, {again:,} duplicates (by Message-ID)"
        if here < len(sent):
            yield f"              {len(sent) - here:,} were sent by other workers of the queue"
        yield f"read them     {self._folder.path}/*.eml"
        if outcome.live:
            yield f"left          {outcome.live:,} jobs; run the demo again to deliver them"
        yield "try next      taskd stats; taskd jobs list --queue email; kill -9 a demo half-way"


def _jobs_line(outcome: Outcome, expected: int) -> str:
    parts = [f"{outcome.done:,} of {expected:,} done", f"{outcome.failed:,} failed"]
    if outcome.cancelled:
        parts.append(f"{outcome.cancelled:,} cancelled")
    return ", ".join(parts)
