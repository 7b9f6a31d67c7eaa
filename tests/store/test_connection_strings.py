"""Connection strings as providers print them, and the found of libpq in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from taskd.config import Settings, check_dsn, connection_parameters, hide_password, load
from taskd.config.libpq_parameters import VARIABLES
from taskd.errors import ConfigError, StoreUnavailable
from taskd.store.connections import driver_args
from taskd.store.connections.database import Database
from tests.canary import PASSWORD
from tests.certificates import make_certificate, server_context


@pytest.fixture(autouse=True)
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def parameters_of(dsn: str) -> dict[str, str]:
    return driver_args.parameters_of({"dsn": check_dsn(dsn)})


def place(found: dict[str, str]) -> tuple[str | None, ...]:
    return tuple(found.get(word) for word in ("host", "port", "user", "password", "dbname"))


@pytest.mark.parametrize(
    ("printed", "expected", "mode"),
    [
        pytest.param(
            "postgresql://neondb_owner:npg_Ab1@ep-cool-leaf-123456-pooler.us-east-2.aws.neon.tech/"
            "neondb?sslmode=require&channel_binding=require",
            ("ep-cool-leaf-123456-pooler.us-east-2.aws.neon.tech", None, "neondb_owner",
             "npg_Ab1", "neondb"),
            "verify-full",
            id="Neon",
        ),
        pytest.param(
            "postgresql://postgres.abcdefghij:p%40ss@aws-0-eu-central-1.pooler.supabase.com:6543/"
            "postgres?pgbouncer=true&connection_limit=1",
            ("aws-0-eu-central-1.pooler.supabase.com", "6543", "postgres.abcdefghij", "p@ss",
             "postgres"),
            None,
            id="Supabase, transaction pooler, for Prisma",
        ),
        pytest.param(
            "postgresql://postgres:pw@db.abcdefghij.supabase.co:5432/postgres",
            ("db.abcdefghij.supabase.co", "5432", "postgres", "pw", "postgres"),
            None,
            id="Supabase, direct",
        ),
        pytest.param(
            "host=jobs.abc123.eu-west-1.rds.amazonaws.com port=5432 dbname=postgres user=postgres "
            "sslmode=verify-full sslrootcert=./global-bundle.pem",
            ("jobs.abc123.eu-west-1.rds.amazonaws.com", "5432", "postgres", None, "postgres"),
            "verify-full",
            id="RDS",
        ),
        pytest.param(
            "postgresql+psycopg2://app:pw@/app?host=/cloudsql/project:europe-west1:jobs",
            ("/cloudsql/project:europe-west1:jobs", None, "app", "pw", "app"),
            None,
            id="Cloud SQL",
        ),
        pytest.param(
            "postgresql://app:pw@localhost/app?host=/cloudsql/project:europe-west1:jobs",
            ("/cloudsql/project:europe-west1:jobs", None, "app", "pw", "app"),
            None,
            id="Cloud SQL, for Prisma",
        ),
        pytest.param(
            "postgres://u4abc:p1def@ec2-54-0-0-1.compute-1.amazonaws.com:5432/d6xyz",
            ("ec2-54-0-0-1.compute-1.amazonaws.com", "5432", "u4abc", "p1def", "d6xyz"),
            None,
            id="Heroku",
        ),
        pytest.param(
            "postgresql://jobs_user:pw@dpg-abc123-a.oregon-postgres.render.com/jobs_x1",
            ("dpg-abc123-a.oregon-postgres.render.com", None, "jobs_user", "pw", "jobs_x1"),
            None,
            id="Render",
        ),
        pytest.param(
            "postgres://3fa85f64-5717:secret-key@01-ab.pg.sdb.fr-par.scw.cloud:5432/jobs"
            "?sslmode=require",
            ("01-ab.pg.sdb.fr-par.scw.cloud", "5432", "3fa85f64-5717", "secret-key", "jobs"),
            "require",
            id="Scaleway",
        ),
        pytest.param(
            "postgresql://u:pw@01-ab.pg.sdb.fr-par.scw.cloud:5432/jobs"
            "?sslmode=verify-full&sslrootcert=system",
            ("01-ab.pg.sdb.fr-par.scw.cloud", "5432", "u", "pw", "jobs"),
            "verify-full",
            id="Scaleway, verified",
        ),
        pytest.param(
            "host=jobs.postgres.database.azure.com port=5432 dbname={your_database} user=ada "
            "password={your_password} sslmode=require",
            ("jobs.postgres.database.azure.com", "5432", "ada", "{your_password}",
             "{your_database}"),
            "require",
            id="Azure",
        ),
    ],
)  # fmt: skip
def test_a_printed_string_is_read(
    printed: str, expected: tuple[str, ...], mode: str | None
) -> None:
    found = parameters_of(printed)
    assert place(found) == expected
    assert found.get("sslmode") == mode
    assert driver_args.server_settings(found) == {}


def test_the_string_for_ado_net_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"ADO\.NET; write it as postgresql://") as raised:
        check_dsn(f"Server=h.example;Database=d;Port=5432;User Id=a;Password={PASSWORD};")
    assert PASSWORD not in str(raised.value)


@pytest.mark.parametrize(
    ("dsn", "uri"),
    [
        ("host=h dbname=d", "postgresql://h/d"),
        (
            f"  user = 'a b'  password='it\\'s {PASSWORD}' dbname=d port=6 host=/run/pg ",
            f"postgresql://a%20b:it%27s%20{PASSWORD}@/d?port=6&host=/run/pg",
        ),
        ("dbname=d options='-c geqo=off'", "postgresql:///d?options=-c%20geqo%3Doff"),
        ("host=a,b port=1,2 user=u", "postgresql://u@/?host=a,b&port=1,2"),
        ("service=jobs", "postgresql:///?service=jobs"),
    ],
)
def test_the_keyword_form_becomes_a_uri(dsn: str, uri: str) -> None:
    assert check_dsn(dsn) == uri
    assert PASSWORD not in hide_password(dsn)
    assert PASSWORD not in hide_password(uri)


def test_an_escaped_space_in_a_password_hides_no_part_of_it_less() -> None:
    assert (
        hide_password(rf"host=h password=a\ {PASSWORD} dbname=d") == "host=h password=*** dbname=d"
    )


@pytest.mark.parametrize(
    ("dsn", "message"),
    [
        ("host=h dbname", "cannot be read after `host=...`"),
        ("host='h dbname=d", "no scheme"),
        ("user=u host='h dbname=d", "cannot be read after `user=...`"),
        ("host=h host=i dbname", "cannot be read after `host=...`"),
        ("postgresql://u:a b@h/d", "write it as %20"),
        ("user:secr://et@h/d", "it has no scheme"),
        ("jdbc:postgresql://h/d?user=a", "remove `jdbc:`"),
        ("postgresql://u:p@x@h/d", "in a password write @"),
        ("postgresql://h/d?sslmode", "has no value"),
        ("postgresql://h/d?sslmode=no-verify", "sslmode is 'no-verify'.*verify-full"),
        ("postgresql://h/d?gssencmode=require", "gssencmode is 'require'"),
        ("postgresql://h/d?require_auth=scram-sha-256", "cannot honour its parameter require_auth"),
        ("postgresql://h/d?target_session_attrs=standby", "any, read-write, primary"),
        ("postgresql://h/d?connect_timeout=soon", "not a whole number"),
        ("postgresql://h/d?port=70000", "up to 65535"),
        ("postgresql://a,b/d?port=1,2,3", "neither one nor the number of its hosts"),
        ("postgresql://h/d?hostaddr=10.0.0.1", "hostaddr together"),
    ],
)
def test_what_cannot_be_honoured_is_named(dsn: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_dsn(dsn)
    with pytest.raises(ConfigError, match=f"TASKD_DSN: .*{message}"):
        load(environ={"TASKD_DSN": dsn})


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://u:1?{PASSWORD}&x=y@h/d",
        f"host=h password=a {PASSWORD}",
        f"postgresql://u:a {PASSWORD}@h/d",
        f"u:{PASSWORD}://x@h/d",
    ],
)
def test_no_part_of_a_wrongly_written_password_is_told(dsn: str) -> None:
    with pytest.raises(ValueError, match=r"has no value|cannot be read|%20|no scheme") as raised:
        check_dsn(dsn)
    assert PASSWORD not in str(raised.value)


def test_words_without_an_effect_here_are_accepted() -> None:
    found = parameters_of(
        "postgresql://u@h/d?application_name=x&fallback_application_name=y&client_encoding=LATIN1"
        "&gssencmode=prefer&channel_binding=prefer&target_session_attrs=primary&sslsni=1"
        "&default_transaction_read_only=off&options=-c%20geqo%3Doff"
    )
    assert driver_args.server_settings(found) == {
        "default_transaction_read_only": "off",
        "options": "-c geqo=off",
    }


def test_the_words_of_other_drivers_for_tls_are_understood() -> None:
    assert parameters_of("postgresql+asyncpg://u@h/d?ssl=verify-ca&sslrootcert=x")["sslmode"] == (
        "verify-ca"
    )
    assert check_dsn("postgresql://u@h/d?ssl=true") == "postgresql://u@h/d?sslmode=require"


def test_channel_binding_becomes_a_verified_certificate() -> None:
    found = parameters_of("postgresql://u@h/d?channel_binding=require&sslmode=require")
    assert (found["sslmode"], found["sslrootcert"]) == ("verify-full", "system")
    own = parameters_of("postgresql://u@h/d?channel_binding=require&sslrootcert=ca.pem")
    assert (own["sslmode"], own["sslrootcert"]) == ("verify-full", "ca.pem")


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u@h/d?channel_binding=require&sslmode=disable",
        "postgresql://u@/d?host=/run/pg&channel_binding=require",
        "postgresql:///d?channel_binding=require",
    ],
)
def test_channel_binding_without_tls_is_refused(dsn: str) -> None:
    with pytest.raises(ConfigError, match="channel_binding=require needs TLS"):
        parameters_of(dsn)


def test_the_authorities_of_the_system_need_a_verified_name() -> None:
    with pytest.raises(ConfigError, match="sslrootcert=system needs sslmode=verify-full"):
        parameters_of("postgresql://u@h/d?sslrootcert=system&sslmode=require")


# Services and variables.


def test_a_service_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".pg_service.conf").write_text(
        f"# services\n[jobs]\nhost=there\nport=7\nuser=ada\npassword={PASSWORD}%s\ndbname=mine\n"
    )
    monkeypatch.setenv("PGSERVICE", "jobs")
    monkeypatch.setenv("PGPORT", "8")
    assert load().settings.dsn == "postgresql://"
    assert place(parameters_of("postgresql://")) == ("there", "7", "ada", f"{PASSWORD}%s", "mine")
    assert place(parameters_of("postgresql:///other"))[4] == "other"
    elsewhere = tmp_path / "services"
    elsewhere.write_text("[jobs]\nhost=elsewhere\n")
    monkeypatch.setenv("PGSERVICEFILE", str(elsewhere))
    assert place(parameters_of("service=jobs user=u"))[:3] == ("elsewhere", "8", "u")


def test_a_service_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PGSERVICE", "jobs")
    with pytest.raises(ConfigError, match=r"no service 'jobs' in .*\.pg_service\.conf"):
        parameters_of("postgresql://")
    file = tmp_path / "services"
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    file.write_text("[jobs]\ngssencmode=require\n")
    with pytest.raises(ConfigError, match=r"the service 'jobs' of .*services: .*gssencmode"):
        parameters_of("postgresql://")
    file.write_text(f"[jobs]\n{PASSWORD}\n")
    with pytest.raises(ConfigError, match="cannot be read") as raised:
        parameters_of("postgresql://")
    assert PASSWORD not in str(raised.value)


def test_variables_fill_what_the_dsn_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PGHOST": "h", "PGSSLMODE": "require", "PGCHANNELBINDING": "require", "PGUSER": "u",
        "PGDATABASE": "d", "PGPASSWORD": PASSWORD, "PGCONNECT_TIMEOUT": "9",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    found = parameters_of("postgresql://")
    assert place(found) == ("h", None, "u", PASSWORD, "d")
    assert (found["sslmode"], found["sslrootcert"]) == ("verify-full", "system")
    assert driver_args.connect_timeout_s(found) == 9
    monkeypatch.setenv("PGGSSENCMODE", "require")
    with pytest.raises(ConfigError, match=r"^PGGSSENCMODE: "):
        parameters_of("postgresql://")


def test_the_variables_are_those_of_libpq() -> None:
    known = {
        "PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGPASSFILE",
        "PGREQUIREAUTH", "PGCHANNELBINDING", "PGSERVICE", "PGSERVICEFILE", "PGOPTIONS",
        "PGSSLMODE", "PGSSLNEGOTIATION", "PGSSLCERT", "PGSSLKEY", "PGSSLCERTMODE",
        "PGSSLROOTCERT", "PGSSLCRL", "PGSSLCRLDIR", "PGSSLSNI", "PGREQUIREPEER", "PGGSSENCMODE",
        "PGKRBSRVNAME", "PGGSSLIB", "PGGSSDELEGATION", "PGSSLMINPROTOCOLVERSION",
        "PGSSLMAXPROTOCOLVERSION", "PGMINPROTOCOLVERSION", "PGCONNECT_TIMEOUT",
        "PGTARGETSESSIONATTRS", "PGLOADBALANCEHOSTS",
    }  # fmt: skip
    assert set(VARIABLES.values()) == known


def test_a_user_without_a_name_is_an_error_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "PGUSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ConfigError, match=r"uid 54321\) has no name.*PGUSER"):
        Database({"dsn": "postgresql://h/d"})
    Database({"dsn": "postgresql://u@h/d"})


def test_each_dsn_without_words_takes_no_variable_for_the_embedded_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGSERVICE", "x")
    found = driver_args.parameters_of({"host": "/s", "port": 1, "user": "u", "database": "d"})
    assert found == {"host": "/s", "port": "1", "user": "u", "dbname": "d"}


# Connections.


def test_limits_and_keepalive_are_those_of_the_dsn() -> None:
    found = parameters_of(
        "postgresql://u@h/d?connect_timeout=600&keepalives_idle=7&tcp_user_timeout=0"
    )
    assert driver_args.connect_timeout_s(found) == driver_args.CONNECT_TIMEOUT_MAX_S
    assert driver_args.keepalive(found) == {
        "TCP_KEEPIDLE": 7, "TCP_KEEPALIVE": 7, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3,
    }  # fmt: skip
    off = parameters_of("postgresql://u@h/d?keepalives=0")
    assert list(driver_args.keepalive(off)) == ["TCP_USER_TIMEOUT"]


async def test_a_parameter_that_the_server_refuses_is_named(dsn: str) -> None:
    joined = "&" if "?" in dsn else "?"
    for word in ("no_such_word=1", "geqo=perhaps", "data_directory=x"):
        with pytest.raises(ConfigError, match=word.partition("=")[0]) as raised:
            await Database({"dsn": f"{dsn}{joined}{word}"}).connect("test")
        assert "Correct or remove the parameter" in raised.value.__notes__[0]


@pytest.mark.parametrize("word", ["sslrootcert", "sslcrl", "sslcert", "sslkey"])
async def test_a_missing_file_of_a_certificate_is_named(word: str, tmp_path: Path) -> None:
    given = {word: tmp_path / "missing.pem"}
    if word == "sslkey":
        given["sslcert"] = make_certificate(tmp_path)
    more = "&".join(f"{name}={path}" for name, path in given.items())
    with pytest.raises(ConfigError, match=rf"{word}, .*missing\.pem, cannot be read: no such file"):
        await Database({"dsn": f"postgresql://u@h/d?sslmode=require&{more}"}).connect("test")


async def test_a_file_that_is_no_certificate_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    for word in ("sslrootcert", "sslcert"):
        with pytest.raises(ConfigError, match=rf"TLS cannot use .*ca\.pem \({word}\)"):
            dsn = f"postgresql://u@h/d?sslmode=require&{word}={file}"
            await Database({"dsn": dsn}).connect("test")


async def test_verification_without_an_authority_says_which_to_name() -> None:
    with pytest.raises(ConfigError, match=r"root\.crt does not exist\. Add sslrootcert=system"):
        await Database({"dsn": "postgresql://u@h/d?sslmode=verify-full"}).connect("test")


@pytest.fixture
async def tls_port(dsn: str, certificate: Path) -> AsyncIterator[int]:
    """A port with TLS in front of this run's server, as a provider's proxy has it."""
    found = parameters_of(dsn)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(8)
            writer.write(b"S")
            await writer.start_tls(server_context(certificate))
        except (OSError, asyncio.IncompleteReadError):
            writer.close()
            return
        if found["host"].startswith("/"):
            path = f"{found['host']}/.s.PGSQL.{found['port']}"
            there, back = await asyncio.open_unix_connection(path)
        else:
            there, back = await asyncio.open_connection(found["host"], int(found["port"]))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield listening.sockets[0].getsockname()[1]
    listening.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def through(dsn: str, port: int, parameters: str, host: str = "localhost") -> Database:
    found = parameters_of(dsn)
    login = f"{found['user']}:{found['password']}" if "password" in found else found["user"]
    return Database(
        {"dsn": check_dsn(f"postgresql://{login}@{host}:{port}/{found['dbname']}?{parameters}")}
    )


async def test_a_string_with_channel_binding_connects_to_a_verified_server(
    dsn: str, tls_port: int, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For OpenSSL, this is the certificate authority of the system.
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    for parameters in (
        "sslmode=require&channel_binding=require",
        "sslrootcert=system",
        f"channel_binding=require&sslrootcert={certificate}",
    ):
        async with through(dsn, tls_port, parameters).connection("test") as connection:
            assert await connection.fetchval("SELECT 1") == 1


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_server_that_cannot_be_verified_is_refused_and_the_reason_told(
    dsn: str, tls_port: int, certificate: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host == "127.0.0.1":  # the authority is known, and the certificate is for another name
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    database = through(dsn, tls_port, "sslmode=require&channel_binding=require", host)
    with pytest.raises(StoreUnavailable, match="SSL: ") as raised:
        await database.connect("test")
    assert "remove channel_binding=require" in raised.value.__notes__[0]
    async with through(dsn, tls_port, "sslmode=require", host).connection("test") as connection:
        assert await connection.fetchval("SELECT 1") == 1


async def test_a_connection_has_the_keepalive_of_its_dsn(dsn: str, tls_port: int) -> None:
    database = through(dsn, tls_port, "sslmode=require&keepalives_idle=7&keepalives_count=2")
    async with database.connection("test") as connection:
        sock = connection._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 7
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 2


def test_a_setting_names_its_source() -> None:
    loaded = load(environ={"DATABASE_URL": "host=h dbname=d"})
    assert loaded.settings.dsn == "postgresql://h/d"
    assert connection_parameters(loaded.settings.dsn)["host"] == "h"
    with pytest.raises(ConfigError, match=r"^DATABASE_URL: .*requirepeer"):
        load(environ={"DATABASE_URL": "postgresql://h/d?requirepeer=x"})
    assert Settings().dsn is None


def query_of(dsn: str) -> dict[str, Any]:
    return parse_qs(urlsplit(dsn).query)


def test_psql_gets_no_parameter_of_another_client() -> None:
    dsn = check_dsn("postgresql://h/d?pgbouncer=true&sslmode=require&supa=base-pooler.x")
    assert query_of(dsn) == {"sslmode": ["require"]}
