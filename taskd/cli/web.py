"""`taskd web`: the dashboard in a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Any

import click

from taskd.cli.shared.session import OfSetting, Session, pass_session, run
from taskd.errors import ConfigError

# The longest time that a page waits for a statement before it shows an error.
PAGE_S = 10.0


@click.command()
@click.option(
    "--listen",
    "web_listen",
    type=OfSetting("web_listen"),
    metavar="HOST:PORT",
    help="Address to serve; 127.0.0.1:8080 by default.",
)
@click.option(
    "--hash-password",
    is_flag=True,
    help="Ask for a password, or read one from stdin, and print its hash for the settings.",
)
@pass_session
def web(session: Session, /, hash_password: bool, **flags: Any) -> None:
    """Serve the dashboard: queues, jobs, workflows, schedules and workers in a browser.

    With a password (TASKD_WEB_PASSWORD, or the file TASKD_WEB_PASSWORD_FILE), the dashboard
    requires a login, and users who are logged in can retry and cancel jobs, pause queues and run
    schedules. Without a password, the dashboard is read-only, and only this machine can connect.
    """
    from taskd.web import check_installed

    check_installed("taskd web")
    if hash_password:
        click.echo(_hashed())
        return
    run(_serve(session, flags))


def _hashed() -> str:
    from taskd.web.access.login import PASSWORD_CHARS_MIN, hashed

    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    if len(password) < PASSWORD_CHARS_MIN:
        raise click.UsageError(f"use at least {PASSWORD_CHARS_MIN} characters")
    return hashed(password)


async def _serve(session: Session, flags: dict[str, Any]) -> None:
    from taskd import events
    from taskd.store.schema import migrations
    from taskd.web.access.guard import check_reach
    from taskd.web.app import make_app
    from taskd.web.pages.dashboard import Dashboard
    from taskd.web.routes import routes
    from taskd.web.server import Server

    loaded = session.load(**flags)
    session.warn(loaded)
    settings = loaded.settings
    if settings.web_listen == "off":
        raise ConfigError("web_listen is off; give an address: --listen 127.0.0.1:8080")
    events.configure(settings.log_format, settings.log_level)
    async with session.target(waits=False) as target:
        limit_s = min(settings.statement_timeout_s, PAGE_S)
        database = target.database.with_timeout(limit_s)
        dashboard = Dashboard(database, settings)
        check_reach(settings.web_listen, guarded=dashboard.guarded)
        server = Server(make_app(routes(dashboard)), settings.web_listen)
        try:
            await migrations.check(database)
            session.echo(_welcome(server.address, dashboard.url, dashboard.guarded))
            await _until_stopped(server, dashboard)
        finally:
            server.close()
            await dashboard.close()


def _welcome(address: str, url: str | None, guarded: bool) -> str:
    acts = "asks for a login" if guarded else "is read-only, because no password is set"
    return f"taskd: the dashboard is at {url or f'http://{address}'}/ and {acts}; Ctrl-C ends it"


async def _until_stopped(server: Any, dashboard: Any) -> None:
    """Serve until SIGTERM or Ctrl-C, or until the server fails."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = () if sys.platform == "win32" else (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    serving = loop.create_task(server.run(), name="web-server")
    stopping = loop.create_task(stop.wait(), name="web-stop")
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        # Streams of live updates have no end: end them first, so that they do not delay the stop.
        dashboard.live.end()
        server.stop()
        await serving
    finally:
        for each in (serving, stopping):
            each.cancel()
        for number in signals:
            loop.remove_signal_handler(number)
