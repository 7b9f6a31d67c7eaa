"""send_email against a real SMTP server, well-behaved and not."""

from __future__ import annotations

import asyncio
import email
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from email.header import decode_header, make_header
from pathlib import Path
from typing import Any

import aiosmtplib
import pytest

from taskd import tasks
from taskd.config import Settings
from taskd.core.jobs.backoff import Fixed
from taskd.core.jobs.verdicts import Fail
from taskd.errors import ConfigError, InvalidArgs
from taskd.tasks import smtp_pool
from taskd.tasks.mail_message import MailDeferred
from taskd.tasks.send_email import Mailer
from tests.certificates import make_certificate, server_context
from tests.tasks.smtp_server import Server, serving

ADA = "ada@example.org"
BOB = "bob@example.com"
EVE = "eve@example.net"


WITHOUT = """
import sys
sys.modules["aiosmtplib"] = None
from taskd import tasks
from taskd.config import Settings
print(tasks.signatures()[0].encode("a@b.example", "Hi", "Hi"))
try:
    tasks.built_in(Settings(smtp_host="mail.example.org"))
except Exception as error:
    print(type(error).__name__, error)
"""


def test_without_the_library_producers_know_the_task_and_workers_say_what_to_install() -> None:
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said == [
        '{"to":"a@b.example","subject":"Hi","body":"Hi"}',
        (
            "ConfigError send_email needs aiosmtplib: pip install 'pgtaskd[mail]', or unset "
            "TASKD_SMTP_HOST"
        ),
    ]


@dataclass
class Attempt:
    idempotency_key: str = "1"
    attempt: int = 1
    max_attempts: int = 20


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with serving() as made:
        yield made


@pytest.fixture
async def mailers() -> AsyncIterator[Callable[[Settings], Mailer]]:
    made: list[Mailer] = []

    def make(settings: Settings) -> Mailer:
        made.append(Mailer(settings))
        return made[-1]

    yield make
    for each in made:
        await each.aclose()


@pytest.fixture
def mailer(server: Server, mailers: Callable[[Settings], Mailer]) -> Mailer:
    return mailers(server.settings())


async def send(mailer: Mailer, ctx: Attempt | None = None, **args: Any) -> dict[str, Any]:
    given = {"to": ADA, "subject": "Hello", "body": "Hello, Ada."} | args
    result: dict[str, Any] = await mailer.task().handler(ctx or Attempt(), **given)
    return result


# The task.


async def test_it_is_on_as_soon_as_there_is_a_host() -> None:
    assert tasks.built_in(Settings()) == []
    [task] = tasks.built_in(Settings(smtp_host="localhost"))
    assert (task.name, task.queue, task.takes_context) == ("send_email", "email", True)
    await tasks.close()


async def test_arguments_are_checked_when_enqueued() -> None:
    task = Mailer(Settings(smtp_host="localhost")).task(backoff=Fixed(0.5))
    assert task.backoff == Fixed(0.5)
    task.job(to=[ADA, BOB], subject="Hi", body="x", cc=EVE, headers={"X-Number": "1"})
    for wrong in (
        {"to": ADA, "subject": "Hi"},
        {"to": ADA, "subject": "x" * 999, "body": "x"},
        {"to": [ADA] * 101, "subject": "x", "body": "x"},
        {"to": ADA, "subject": "x", "body": "x" * 262_145},
        {"to": ADA, "subject": "x", "body": "x", "sender": BOB},
        {"to": {"a": 1}, "subject": "x", "body": "x"},
    ):
        with pytest.raises(InvalidArgs):
            task.job(**wrong)


def test_a_wrong_sender_shows_at_the_start() -> None:
    with pytest.raises(ConfigError, match="TASKD_SMTP_SENDER"):
        Mailer(Settings(smtp_host="localhost", smtp_sender="nobody"))


async def test_close_closes_what_is_kept(server: Server) -> None:
    [task] = tasks.built_in(server.settings())
    await task.handler(Attempt(), ADA, "Hi", "Hi")
    assert len(server.open) == 1
    await tasks.close()
    while server.open:
        await asyncio.sleep(0.01)


# The message.


async def test_what_arrives(server: Server, mailer: Mailer) -> None:
    result = await send(
        mailer,
        to=["Zoë Ørsted <zoe@example.org>", "Lovelace, Ada <ada@example.org>"],
        cc="bob@example.com",
        bcc=["eve@example.net"],
        reply_to="Support <help@example.org>",
        subject="Ihre Bestellung № 42 📦",
        body="Grüße\nFrom here\n.\nlong " + "x" * 2000,
        html="<p>Grüße</p>",
        headers={"X-Order": "42", "X-Name": "Zoë"},
    )
    [(recipients, message)] = server.mails
    assert recipients == ["zoe@example.org", ADA, BOB, EVE]
    assert message["From"] == "The shop <shop@example.org>"
    names = [each.display_name for each in message["To"].addresses]
    assert names == ["Zoë Ørsted", "Lovelace, Ada"]
    assert message["Cc"] == BOB
    assert message["Reply-To"] == "Support <help@example.org>"
    assert message["Subject"] == "Ihre Bestellung № 42 📦"
    assert (message["X-Order"], message["X-Name"]) == ("42", "Zoë")
    assert message["Date"].datetime is not None
    assert message["Message-ID"] == result["message_id"]
    assert result["message_id"].endswith("@example.org>")
    assert result["refused"] == {}
    plain, html = message.get_body(("plain",)), message.get_body(("html",))
    assert plain is not None
    assert html is not None
    text = "Grüße\nFrom here\n.\nlong " + "x" * 2000 + "\n"
    assert plain.get_content().replace("\r\n", "\n") == text
    assert html.get_content().strip() == "<p>Grüße</p>"
    raw = server.raw[0]
    assert b"eve@" not in raw
    assert raw.isascii()
    assert max(len(line) for line in raw.split(b"\r\n")) <= 998
    assert b"\n" not in raw.replace(b"\r\n", b"")


async def test_a_plain_mail_has_one_part(server: Server, mailer: Mailer) -> None:
    await send(mailer, to="ada@bücher.example", body="")
    [(recipients, message)] = server.mails
    assert recipients == ["ada@xn--bcher-kva.example"]
    assert message.get_content_type() == "text/plain"
    assert message.get_content().strip() == ""


async def test_long_texts_keep_their_words(server: Server, mailer: Mailer) -> None:
    subject = " ".join(f"größer{number}" for number in range(90))
    name = "Åsa " * 40 + "Å"
    await send(mailer, to=[f"{name} <a{n}@example.org>" for n in range(3)], subject=subject)
    [(_, message)] = server.mails
    assert message["Subject"] == subject
    # Not by the email package's newer parser: it keeps the white space between encoded words.
    raw = email.message_from_bytes(server.raw[0])["To"]
    read = str(make_header(decode_header(raw)))
    assert read == ", ".join(f"{name} <a{n}@example.org>" for n in range(3))


async def test_the_message_id_belongs_to_the_job(server: Server, mailer: Mailer) -> None:
    first = await send(mailer, Attempt("7", attempt=1))
    second = await send(mailer, Attempt("7", attempt=2))
    other = await send(mailer, Attempt("8"))
    elsewhere = await send(mailer, Attempt("7"), body="Another database's job 7.")
    ids = [each["message_id"] for each in (first, second, other, elsewhere)]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ({"subject": "Hi\r\nBcc: eve@example.net"}, "subject: .* line break"),
        ({"subject": "Hi\nX: y"}, "subject: .* line break"),
        ({"subject": "Hi\u2028X: y"}, "subject: .* line break"),
        ({"subject": "x" * 999}, "subject: it is longer"),
        ({"to": "Ada\r\nX: y <ada@example.org>"}, "to: .* line break"),
        ({"to": "ada@example.org\n"}, "to: .* line break"),
        ({"to": "ada@example.org>\rRCPT TO:<eve@example.net"}, "to: .* line break"),
        ({"cc": ["bob@example.com\x00"]}, "cc: .* control"),
        ({"to": "ada"}, "to: 'ada' is not a mail address"),
        ({"to": ""}, "to: '' is not a mail address"),
        ({"to": []}, "no recipient"),
        ({"to": "ada@example.org, bob@example.com"}, "give several addresses as a list"),
        ({"to": "ada@exa mple.org"}, "not a mail address"),
        ({"to": "ada@-example.org"}, "not a mail address"),
        ({"to": "@example.org"}, "not a mail address"),
        ({"to": "a..b@example.org"}, "not a mail address"),
        ({"to": "Ada <ada@example.org> SIZE=1"}, "not a mail address"),
        ({"to": "zoë@example.org"}, "only ASCII"),
        ({"to": "ada@" + "ü" * 64 + ".example"}, "no such domain"),
        ({"to": "x" * 300 + " <ada@example.org>"}, "longer than 200"),
        ({"bcc": "eve"}, "bcc: 'eve'"),
        ({"reply_to": "help\n@example.org"}, "reply_to: .* line break"),
        ({"headers": {"X-A": "1\r\nX-B: 2"}}, "header X-A: .* line break"),
        ({"headers": {"X A": "1"}}, "not a header's name"),
        ({"headers": {"X-A:": "1"}}, "not a header's name"),
        ({"headers": {"bcc": EVE}}, "written by send_email itself"),
        ({"headers": {"Content-Type": "text/html"}}, "written by send_email itself"),
        ({"headers": {f"X-{n}": "1" for n in range(51)}}, "there are 51"),
        ({"to": [ADA], "cc": [f"b{n}@example.org" for n in range(100)]}, "101 recipients"),
    ],
)
async def test_what_is_not_fit_to_be_sent_fails(
    server: Server, mailer: Mailer, args: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Fail, match=reason):
        await send(mailer, **args)
    assert server.connections == 0


# What the server answers.


async def test_refused_for_good_fails_with_the_answer(server: Server, mailer: Mailer) -> None:
    server.answers[ADA] = ["550 5.1.1 no such user here"]
    with pytest.raises(Fail, match=r"ada@example.org: 550 5\.1\.1 no such user here"):
        await send(mailer)
    server.answers = {"DATA": ["554 5.7.1 spam"]}
    with pytest.raises(Fail, match=r"the mail: 554 5\.7\.1 spam"):
        await send(mailer)
    server.answers = {"MAIL": ["553 5.1.8 who are you"]}
    with pytest.raises(Fail, match=r"553 .*who are you"):
        await send(mailer)
    server.answers = {}
    await send(mailer)
    # Refusals leave the connection usable; only a refused sender made us try a second one.
    assert server.connections == 2


@pytest.mark.parametrize("command", ["MAIL", "DATA", ADA])
async def test_deferred_is_tried_again(server: Server, mailer: Mailer, command: str) -> None:
    server.answers[command] = ["451 4.7.1 come back later", None]
    with pytest.raises(MailDeferred, match=r"451 4\.7\.1 come back later"):
        await send(mailer)
    await send(mailer, Attempt(attempt=2))
    assert len(server.mails) == 1
    assert server.connections == 1


async def test_some_refused_for_good(server: Server, mailer: Mailer) -> None:
    server.answers[BOB] = ["550 no such user"]
    result = await send(mailer, to=[ADA, BOB])
    assert result["refused"] == {BOB: "550 no such user"}
    assert [recipients for recipients, _ in server.mails] == [[ADA]]
    with pytest.raises(Fail):
        await send(mailer, to=[BOB, BOB])


async def test_some_deferred_holds_the_mail_back_for_all(server: Server, mailer: Mailer) -> None:
    server.answers |= {BOB: ["452 mailbox full", None], EVE: ["550 no such user"]}
    with pytest.raises(MailDeferred, match=r"bob@example.com: 452 .*no recipient has got the mail"):
        await send(mailer, to=[ADA, BOB, EVE])
    assert server.mails == []
    result = await send(mailer, Attempt(attempt=2), to=[ADA, BOB, EVE])
    assert [recipients for recipients, _ in server.mails] == [[ADA, BOB]]
    assert result["refused"] == {EVE: "550 no such user"}


@pytest.mark.parametrize("ctx", [Attempt(attempt=20), Attempt(attempt=3, max_attempts=3)])
async def test_the_last_attempt_serves_whom_it_can(
    server: Server, mailer: Mailer, ctx: Attempt
) -> None:
    server.answers[BOB] = ["452 mailbox full"]
    result = await send(mailer, ctx, to=[ADA, BOB])
    assert [recipients for recipients, _ in server.mails] == [[ADA]]
    assert result["refused"] == {BOB: "452 mailbox full"}
    with pytest.raises(MailDeferred):
        await send(mailer, ctx, to=BOB)


async def test_what_is_reported_about_us_does_not_fail_the_mail(
    server: Server, mailer: Mailer
) -> None:
    server.answers["MAIL"] = ["530 5.7.0 authentication required"]
    with pytest.raises(MailDeferred, match="530"):
        await send(mailer)


@pytest.mark.parametrize("when", ["MAIL", ADA, "DATA"])
async def test_a_broken_connection_is_tried_again(
    server: Server, mailer: Mailer, when: str
) -> None:
    server.answers[when] = ["drop", None]
    with pytest.raises(aiosmtplib.SMTPServerDisconnected):
        await send(mailer)
    await send(mailer, Attempt(attempt=2))
    assert len(server.mails) == 1


async def test_a_lost_answer_makes_a_duplicate_that_can_be_told(
    server: Server, mailer: Mailer
) -> None:
    server.answers["DATA"] = ["take and drop"]
    with pytest.raises(aiosmtplib.SMTPServerDisconnected):
        await send(mailer)
    await send(mailer, Attempt(attempt=2))
    first, second = (message["Message-ID"] for _, message in server.mails)
    assert first == second


async def test_nobody_listens(server: Server, mailers: Callable[[Settings], Mailer]) -> None:
    mailer = mailers(server.settings(smtp_port=1))
    with pytest.raises(aiosmtplib.SMTPConnectError):
        await send(mailer)


async def test_silence_is_tried_again(
    server: Server, mailer: Mailer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskd.tasks.smtp_delivery.CONTENT_TIMEOUT_S", 0.05)
    server.data_s = 30.0
    with pytest.raises(aiosmtplib.SMTPTimeoutError):
        await send(mailer)
    server.data_s = 0.0
    await send(mailer, Attempt(attempt=2))
    assert server.connections == 2


# Kept connections.


async def test_connections_are_reused_and_bounded(server: Server, mailer: Mailer) -> None:
    server.data_s = 0.01
    await asyncio.gather(*(send(mailer, Attempt(str(n))) for n in range(60)))
    assert len(server.mails) == 60
    assert server.most_open == server.connections == smtp_pool.CONNECTIONS_MAX


@pytest.mark.parametrize(
    "how", ["closed by the server", "421 4.4.2 idle for too long", "550 too many mails", "drop"]
)
async def test_a_kept_connection_that_is_of_no_use_is_replaced(
    server: Server, mailer: Mailer, how: str
) -> None:
    await send(mailer)
    if how == "closed by the server":
        server.drop_all()
    else:
        server.answers["MAIL"] = [how, None]
    await send(mailer, Attempt("2"))
    assert len(server.mails) == 2
    assert server.connections == 2


async def test_the_server_restarts_while_ten_connections_are_kept(
    server: Server, mailer: Mailer
) -> None:
    server.data_s = 0.01
    await asyncio.gather(*(send(mailer, Attempt(str(n))) for n in range(20)))
    server.drop_all()
    await asyncio.gather(*(send(mailer, Attempt(str(n))) for n in range(20, 40)))
    assert len(server.mails) == 40
    assert server.most_open == smtp_pool.CONNECTIONS_MAX


async def test_idle_connections_are_closed(server: Server) -> None:
    pool = smtp_pool.Pool(server.settings(), idle_s=0.05)
    async with pool.connection() as first:
        assert not first.reused
    async with pool.connection() as again:
        assert again is first
        assert again.reused
    while server.open:
        await asyncio.sleep(0.01)
    async with pool.connection() as second:
        assert second is not first
    await pool.aclose()


async def test_a_cancelled_attempt_does_not_leave_half_a_mail(
    server: Server, mailer: Mailer
) -> None:
    server.data_s = 30.0
    attempt = asyncio.create_task(send(mailer))
    while not server.contents:
        await asyncio.sleep(0.01)
    attempt.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    server.data_s = 0.0
    await send(mailer, Attempt("2"))
    assert len(server.mails) == 1


async def test_a_connection_in_use_is_closed_when_it_comes_back(server: Server) -> None:
    pool = smtp_pool.Pool(server.settings())
    async with pool.connection():
        await pool.aclose()
        assert len(server.open) == 1
    while server.open:
        await asyncio.sleep(0.01)


# TLS and login.


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for localhost, with its key in one file."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    return server_context(certificate)


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))


async def sent_over(
    settings: Settings, mailers: Callable[[Settings], Mailer], count: int = 1
) -> None:
    mailer = mailers(settings)
    for number in range(count):
        await send(mailer, Attempt(str(number)))


async def test_auto_takes_tls_when_offered(
    tls: ssl.SSLContext, mailers: Callable[[Settings], Mailer]
) -> None:
    async with serving(tls_context=tls, require_starttls=True) as server:
        await sent_over(server.settings(smtp_tls="auto"), mailers, 3)
        assert len(server.mails) == 3


async def test_auto_does_without_tls(server: Server, mailers: Callable[[Settings], Mailer]) -> None:
    await sent_over(server.settings(smtp_tls="auto"), mailers)
    assert len(server.mails) == 1


async def test_starttls_wants_a_certificate_that_holds(
    tls: ssl.SSLContext, mailers: Callable[[Settings], Mailer]
) -> None:
    async with serving(tls_context=tls) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await sent_over(server.settings(smtp_tls="starttls"), mailers)


async def test_starttls_is_required(server: Server, mailers: Callable[[Settings], Mailer]) -> None:
    with pytest.raises(aiosmtplib.SMTPException, match="STARTTLS"):
        await sent_over(server.settings(smtp_tls="starttls"), mailers)


@pytest.mark.usefixtures("trusted")
async def test_starttls_with_a_trusted_certificate(
    tls: ssl.SSLContext, mailers: Callable[[Settings], Mailer]
) -> None:
    async with serving(tls_context=tls, require_starttls=True) as server:
        await sent_over(server.settings(smtp_tls="starttls"), mailers)
        assert len(server.mails) == 1


@pytest.mark.usefixtures("trusted")
async def test_tls_from_the_start(
    tls: ssl.SSLContext, mailers: Callable[[Settings], Mailer]
) -> None:
    async with serving(implicit_tls=tls) as server:
        await sent_over(server.settings(smtp_tls="tls"), mailers, 2)
        assert len(server.mails) == 2
        assert server.connections == 1


@pytest.mark.usefixtures("trusted")
async def test_auto_knows_the_port_of_tls(
    tls: ssl.SSLContext, mailers: Callable[[Settings], Mailer], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(implicit_tls=tls) as server:
        monkeypatch.setattr(smtp_pool, "TLS_PORT", server.port)
        await sent_over(server.settings(smtp_tls="auto"), mailers)
        assert len(server.mails) == 1


@pytest.mark.usefixtures("trusted")
async def test_login(tls: ssl.SSLContext, mailers: Callable[[Settings], Mailer]) -> None:
    async with serving(tls_context=tls, auth_required=True) as server:
        login = {"smtp_user": "robot", "smtp_tls": "auto"}
        with pytest.raises(MailDeferred, match="530"):
            await sent_over(server.settings(smtp_tls="auto"), mailers)
        # A wrong password is for us to repair; the mails wait.
        with pytest.raises(aiosmtplib.SMTPAuthenticationError):
            await sent_over(server.settings(**login, smtp_password="wrong"), mailers)
        await sent_over(server.settings(**login, smtp_password="s3cret"), mailers, 3)
        assert len(server.mails) == 3
        assert server.connections == 3


async def test_a_password_is_not_sent_unprotected(
    mailers: Callable[[Settings], Mailer],
) -> None:
    async with serving(auth_require_tls=False) as server:
        login = {"smtp_user": "robot", "smtp_password": "s3cret"}
        with pytest.raises(smtp_pool.Unprotected, match="TASKD_SMTP_TLS=off"):
            await sent_over(server.settings(**login, smtp_tls="auto"), mailers)
        assert server.logins == []
        await sent_over(server.settings(**login, smtp_tls="off"), mailers)
        assert server.logins == [b"robot"]


async def test_a_password_does_not_go_to_a_certificate_that_nobody_trusts(
    tls: ssl.SSLContext, mailers: Callable[[Settings], Mailer]
) -> None:
    async with serving(tls_context=tls) as server:
        with pytest.raises(ssl.SSLCertVerificationError):
            await sent_over(server.settings(smtp_tls="auto", smtp_user="robot"), mailers)
        assert server.logins == []
