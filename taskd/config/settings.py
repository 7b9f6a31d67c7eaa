"""Settings: each is declared once, with its default, unit and help.

A declaration defines a key of taskd.toml and of `[tool.taskd]` in pyproject.toml, and the variable
`TASKD_<NAME>`. `taskd config` and the reference have a row for it. Flags override the environment,
the environment overrides taskd.toml, taskd.toml overrides pyproject.toml, and all of them override
the default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from taskd.config.dsn import dsn_text
from taskd.config.parsing import (
    SCHEMA_DEFAULT,
    address,
    app_name,
    environment_name,
    names,
    networks,
    one_of,
    schema_name,
    seconds,
    served_queues,
    table,
    task_prefix,
    url,
    whole_number,
    worker_name,
)
from taskd.config.secrets import (
    hidden,
    without_environments,
    without_password,
    without_passwords,
)

LOG_LEVELS = ("debug", "info", "warning", "error")
PG_MAJOR_OLDEST = 15


def setting(
    default: Any,
    help_text: str,
    parse: Callable[[Any], Any],
    *,
    show: Callable[[Any], Any] = without_passwords,
) -> Any:
    """Declare a setting: its default, its help, its parser, and how its value is displayed."""
    return field(default=default, metadata={"help": help_text, "parse": parse, "show": show})


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. Durations are in seconds, and their names end in `_s`."""

    dsn: str | None = setting(
        None,
        "The database: postgresql://user@host/database. Without a DSN, taskd starts the embedded "
        "PostgreSQL.",
        dsn_text,
        show=without_password,
    )
    dsn_file: Path | None = setting(None, "A file that contains only the DSN.", Path)
    listen_dsn: str | None = setting(
        None,
        "A DSN for LISTEN that leads to PostgreSQL itself, if `dsn` leads to a pooler.",
        dsn_text,
        show=without_password,
    )
    schema: str = setting(
        SCHEMA_DEFAULT,
        "Name of the schema with taskd's tables and functions. Several installations can share a "
        "database, each with a schema of its own. Workers and producers of an installation need "
        "the same value.",
        schema_name,
    )
    listen_connections: str = setting(
        "auto",
        "Connections of a worker process for LISTEN: per-queue (one for each queue, so the loss "
        "of one delays only its queue), shared (one for all queues), or auto (per-queue for up to "
        "four queues, shared for more).",
        one_of("auto", "per-queue", "shared"),
    )
    environment: str | None = setting(
        None,
        "Name of the environment, such as production. A worker runs jobs only if the database "
        "belongs to the same environment. So a worker of staging runs no job in a copy of the "
        "database of production.",
        environment_name,
    )
    embedded: str = setting(
        "auto",
        "auto: without a DSN, start the embedded PostgreSQL. off: fail instead.",
        one_of("auto", "off"),
    )
    data_dir: Path | None = setting(
        None,
        "Directory of the embedded PostgreSQL's data; by default `taskd` in the user's data "
        "directory.",
        Path,
    )
    pg_bin: Path | None = setting(
        None,
        "The bin directory of the embedded PostgreSQL; by default taskd searches for one.",
        Path,
    )
    pg_major: int | None = setting(
        None,
        "Major version of the embedded PostgreSQL. By default, the newest version that has data; "
        "if there is no data, the version of the programs that taskd finds.",
        whole_number(PG_MAJOR_OLDEST, 99),
    )
    app: str | None = setting(None, "The module whose @task functions the worker runs.", str)
    app_name: str | None = setting(
        None,
        "The name of the app, unique among the apps of the database; by default the names of its "
        "project and its module, such as billing:worker.",
        app_name,
    )
    name: str | None = setting(
        None,
        "A name of the worker, which reports and commands show beside its host and pid. Several "
        "workers can have one name; the processes of a worker share it.",
        worker_name,
    )
    task_prefix: str | None = setting(
        None,
        "A prefix of the app's task names: with billing, the task export is named billing.export. "
        "Workers and producers of the app need the same value.",
        task_prefix,
    )
    queues: tuple[str, ...] = setting(
        (),
        "Queues to serve, with commas between them: `email,reports:4,tenant-*`. Each is a name, or "
        "a pattern in which `*` stands for any characters; after a colon follows its concurrency. "
        "By default all queues of the app.",
        served_queues,
    )
    concurrency: int = setting(
        100, "Concurrent attempts per queue, in each worker process.", whole_number(1, 10_000)
    )
    max_running: int | None = setting(
        None,
        "Most concurrent attempts of all queues together, in each worker process; queues with jobs "
        "take turns. By default, only the concurrency of each queue limits its attempts.",
        whole_number(1, 100_000),
    )
    processes: int = setting(
        1,
        "Worker processes, at most 64. If there are several, a parent process starts them.",
        whole_number(1, 64),
    )
    threads: int = setting(
        16, "Threads for plain `def` handlers, per process.", whole_number(1, 1000)
    )
    max_lost_threads: int | None = setting(
        None,
        "Drain, and end with exit code 75, when this many threads of a process are lost to "
        "functions that ignore their timeout, so that a supervisor starts the process again. By "
        "default, the process continues.",
        whole_number(1, 1000),
    )
    process_slots: int | None = setting(
        None,
        "Processes for handlers with process=True, per worker process; one per core by default.",
        whole_number(1, 256),
    )
    process_jobs_max: int = setting(
        1000,
        "Attempts that a process for process=True handlers runs before a new process replaces it.",
        whole_number(1, 10**9),
    )
    process_memory_mb: int | None = setting(
        None,
        "Memory limit of a process for process=True handlers, in MiB. A handler that needs more "
        "gets MemoryError. By default, there is no limit.",
        whole_number(64, 16 * 1024 * 1024),
    )
    transaction_connections: int = setting(
        4, "Connections for handlers with transaction=, per process.", whole_number(1, 100)
    )
    drain_s: float = setting(
        25.0, "How long a drain waits for running attempts.", seconds(0.0, 86400.0)
    )
    cancel_s: float = setting(
        5.0,
        "How long a stop waits for cancelled attempts before it abandons them.",
        seconds(0.0, 3600.0),
    )
    lease_s: float = setting(
        30.0,
        "How long the claims of a worker stay valid without a lease renewal.",
        seconds(1.0, 3600.0),
    )
    poll_s: float = setting(
        5.0,
        "Longest interval between two polls of an idle queue; each interval varies randomly by up "
        "to a fifth.",
        seconds(0.1, 60.0),
    )
    statement_timeout_s: float = setting(
        5.0, "Timeout of one statement of the worker.", seconds(0.5, 60.0)
    )
    job_lines_per_s: int = setting(
        10,
        "Most successes per second that are logged individually; one line counts the others.",
        whole_number(0, 100_000),
    )
    keep_logs: str = setting(
        "off",
        "Which attempts keep their handlers' log lines with the job: off (none), failed or all; "
        "a task can override it.",
        one_of("off", "failed", "all"),
    )
    log_level: str = setting(
        "info",
        "Lowest level that is logged: debug, info, warning or error.",
        one_of(*LOG_LEVELS),
    )
    log_format: str = setting(
        "auto",
        "auto (console on a terminal, json otherwise), console (for people), or json.",
        one_of("auto", "console", "json"),
    )
    http: str = setting(
        "off",
        "Address of a worker's /livez, /readyz, /metrics and dashboard: `host:port`, or a port "
        "of 127.0.0.1.",
        address,
    )
    web_listen: str = setting(
        "127.0.0.1:8080",
        "Address of `taskd web`: `host:port`, or a port of 127.0.0.1.",
        address,
    )
    web_url: str | None = setting(
        None,
        "URL of the dashboard for browsers, if a proxy is in front of it: https://jobs.example.org.",
        url,
    )
    web_proxies: tuple[str, ...] = setting(
        (),
        "Addresses or networks of the proxies in front of the dashboard. The dashboard trusts "
        "their X-Forwarded-For headers, to limit failed logins per client.",
        networks,
    )
    web_password: str | None = setting(
        None,
        "Password of the dashboard, or its hash from `taskd web --hash-password`. "
        "Without a password, the dashboard is read-only.",
        str,
        show=hidden,
    )
    web_password_file: Path | None = setting(
        None, "A file with the password, or with a line `name:scrypt:...` per user.", Path
    )
    smtp_host: str | None = setting(
        None, "The mail server. This setting enables the task send_email.", str
    )
    smtp_port: int | None = setting(
        None,
        "Port of the mail server; by default 25, or 587 with starttls, or 465 with tls.",
        whole_number(1, 65535),
    )
    smtp_tls: str = setting(
        "auto",
        "auto (STARTTLS if the server offers it), starttls (required), tls or off.",
        one_of("auto", "starttls", "tls", "off"),
    )
    smtp_user: str | None = setting(None, "User name at the mail server.", str)
    smtp_password: str | None = setting(None, "Password at the mail server.", str, show=hidden)
    smtp_sender: str | None = setting(
        None, "The From address of mails; taskd@<host name> by default.", str
    )
    commands: dict[str, Any] | None = setting(
        None,
        "Commands that run_command can run, by name; each is a table with argv. Enables the task. "
        "In the environment, write JSON.",
        table,
        show=without_environments,
    )
    http_hosts: tuple[str, ...] = setting(
        (),
        "Hosts that the task http_request can call; this setting enables the task. Examples: "
        "`hooks.example.org`, `*.example.org:8443`, `*`.",
        names,
    )
    http_networks: tuple[str, ...] = setting(
        (),
        "Private networks that the task http_request can call, such as `10.1.0.0/16`.",
        names,
    )
    http_secrets: dict[str, Any] | None = setting(
        None,
        "Secrets with which http_request signs requests, by name; each is `whsec_`, followed by "
        "base64. In the environment, write JSON.",
        table,
        show=hidden,
    )
