"""The checks: their names, which scripts know, what they look at, and why it matters."""

from __future__ import annotations

from taskd.core.doctor import jobs, schema, server, settings, setup, storage
from taskd.core.doctor.finding import Check

# What is looked at on this machine, beside the statements.
LOCAL = ("setup", "reach", "place", "known_migrations", "schema_objects", "grants_text")
_SCHEMA = ("known_migrations", "doctor_migrations")

SETUP = (
    Check(
        "settings", "Files and variables that hold settings",
        "A setting that is not read does nothing, and nobody notices.",
        ("setup",), setup.settings,
    ),
    Check(
        "dsn", "Where the DSN was found",
        "A worker and a producer on two databases never meet.",
        ("setup",), setup.dsn,
    ),
    Check(
        "embedded", "The embedded PostgreSQL, if it is the one",
        "Without a DSN all jobs are in it.",
        ("setup",), setup.embedded,
    ),
)  # fmt: skip

DATABASE = (
    Check(
        "reach", "Whether the database answers",
        "Nothing runs without it.",
        ("reach",), setup.reach,
    ),
    Check(
        "primary", "Whether the server takes writes",
        "A standby takes none, so no job moves.",
        ("doctor_server",), server.primary,
    ),
    Check(
        "server_version", "PostgreSQL's version and its support",
        "Bugs that lose data are mended in supported versions alone.",
        ("doctor_server",), server.version,
    ),
    Check(
        "server_settings", "Settings of the server, the database and logins that hurt",
        "Each of them loses jobs, or makes them late.",
        ("doctor_settings", "doctor_server", "doctor_partitions"), settings.settings,
    ),
    Check(
        "connections", "Connections in use and allowed",
        "A worker that gets none does not start, and a producer that gets none fails.",
        ("doctor_server",), server.connections,
    ),
    Check(
        "pooler", "PgBouncer and its like, and listen_dsn",
        "Behind a pooler a notification is lost, and jobs start up to five seconds late.",
        ("place",), server.pooler,
    ),
    Check(
        "clock", "This machine's clock against the database's",
        "taskd goes by the database's clock; logs of two machines are read side by side.",
        ("place",), server.clock,
    ),
    Check(
        "wraparound", "The age of the oldest transaction id",
        "When ids run out, the server takes no more writes.",
        ("doctor_server",), server.wraparound,
    ),
    Check(
        "notify_queue", "How full the queue of notifications is, and who holds it back",
        "While it is nearly full nobody rings, so jobs start seconds late; others' NOTIFY fails.",
        ("doctor_server", "doctor_listeners"), server.notify_queue,
    ),
    Check(
        "held_snapshots", "Transactions, prepared ones, slots and standbys that hold vacuum back",
        "What ended since cannot be removed, so claims read through ever more of it.",
        ("doctor_snapshots", "doctor_server"), storage.held_snapshots,
    ),
    Check(
        "table_locks", "Sessions that lock taskd's tables",
        "Claims and acks wait for them, and autovacuum gives way to them.",
        ("doctor_locks",), storage.table_locks,
    ),
    Check(
        "dead_tuples", "Rows of taskd's tables that are dead",
        "Each claim may have to step over them.",
        ("doctor_tables",), storage.dead_tuples,
    ),
    Check(
        "autovacuum", "Whether autovacuum comes to taskd's tables",
        "A queue makes two dead rows per job, and nothing else removes them.",
        ("doctor_tables", "doctor_locks"), storage.autovacuum,
    ),
    Check(
        "index_bloat", "Indexes that are far larger than what they hold",
        "What does not fit into memory is read from the disk, at each claim.",
        ("doctor_indexes",), storage.index_bloat,
    ),
    Check(
        "invalid_indexes", "Indexes that are invalid",
        "They are written to and never read.",
        ("doctor_indexes", "schema_objects"), storage.invalid_indexes,
    ),
    Check(
        "schema_version", "Migrations that are missing or unknown",
        "taskd's statements fit one schema.",
        ("doctor_migrations", "known_migrations"), schema.version,
    ),
    Check(
        "objects", "Tables, columns, constraints, indexes, functions that are missing or changed",
        "taskd's promises rest on them as they were installed.",
        ("doctor_objects", "schema_objects", *_SCHEMA), schema.objects,
    ),
    Check(
        "extra_objects", "Indexes, triggers and others that users have put there",
        "Each costs something at every job.",
        ("doctor_objects", "schema_objects", *_SCHEMA), schema.extra_objects,
    ),
    Check(
        "grants", "The rights of the roles of `taskd db roles`",
        "Too few and jobs stand still; too many and a leaked password does harm.",
        ("doctor_grants", "grants_text", *_SCHEMA), schema.grants,
    ),
    Check(
        "logins", "As whom workers are connected",
        "Handlers' code may do whatever the worker's login may.",
        ("doctor_logins", "doctor_grants", "place"), schema.logins,
    ),
    Check(
        "default_partition", "Finished jobs in the default partition of the history",
        "They keep partitions of their days from being made, and are deleted one by one.",
        ("doctor_default",), schema.default_partition,
    ),
    Check(
        "partitions_ahead", "Partitions for jobs that end today and tomorrow",
        "What finds none goes to the default partition.",
        ("doctor_partitions", "doctor_retentions"), schema.partitions_ahead,
    ),
    Check(
        "expired_partitions", "Partitions that should be gone",
        "They take room, and may hold what you promised to delete.",
        ("doctor_partitions",), schema.expired_partitions,
    ),
    Check(
        "unserved_queues", "Queues with due jobs and no live worker",
        "Their jobs do not run.",
        ("doctor_queues",), jobs.unserved_queues,
    ),
    Check(
        "unknown_tasks", "Waiting jobs whose task no worker of their queue knows",
        "They are given back again and again, and do not run.",
        ("doctor_tasks",), jobs.unknown_tasks,
    ),
    Check(
        "paused", "Queues and tasks that are paused for more than a day",
        "Somebody may have forgotten to resume them.",
        ("doctor_queues", "doctor_tasks"), jobs.paused,
    ),
    Check(
        "workers", "Workers that do not beat, do not end, or differ in their version",
        "What a silent worker had claimed waits until it is buried.",
        ("doctor_workers",), jobs.workers,
    ),
    Check(
        "schedules", "Schedules that are overdue or failed",
        "Their jobs are not made.",
        ("doctor_schedules",), jobs.schedules,
    ),
    Check(
        "suspects", "Jobs whose worker died, and that wait for another try",
        "They run one at a time, so many of them take long.",
        ("doctor_stuck",), jobs.suspects,
    ),
    Check(
        "stuck_jobs", "Jobs that ought to have moved by now",
        "Each of them breaks a promise.",
        ("doctor_stuck", "doctor_queues"), jobs.stuck_jobs,
    ),
    Check(
        "limits", "Limits that hold up jobs, and depths that nobody counts",
        "A limit that is not looked at stops its jobs.",
        ("doctor_limits",), jobs.limits,
    ),
    Check(
        "keys", "Unique keys whose time is over",
        "They take room.",
        ("doctor_keys",), jobs.keys,
    ),
)  # fmt: skip

CHECKS = (*SETUP, *DATABASE)


def statements(checks: tuple[Check, ...]) -> list[str]:
    """The statements that these checks need, in the order of the checks."""
    wanted = dict.fromkeys(name for check in checks for name in check.needs)
    return [name for name in wanted if name not in LOCAL]
