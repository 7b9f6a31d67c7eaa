"""The checks: their names, which scripts use, what they check, and why it matters."""

from __future__ import annotations

from taskd.core.doctor import jobs, schema, server, settings, setup, storage
from taskd.core.doctor.finding import Check

# Facts about this machine, beside the rows of statements.
LOCAL = ("setup", "reach", "connection", "known_migrations", "schema_objects", "grants_text")
_SCHEMA = ("known_migrations", "doctor_migrations")

SETUP = (
    Check(
        "settings", "Files and variables that hold settings",
        "A setting that is not read has no effect, and nothing else shows that.",
        ("setup",), setup.settings,
    ),
    Check(
        "dsn", "Where the DSN was found",
        "A worker and a producer on two databases never meet.",
        ("setup",), setup.dsn,
    ),
    Check(
        "embedded", "The embedded PostgreSQL, if it is in use",
        "Without a DSN all jobs are in it.",
        ("setup",), setup.embedded,
    ),
)  # fmt: skip

DATABASE = (
    Check(
        "reach", "Whether the database answers",
        "No job runs without it.",
        ("reach",), setup.reach,
    ),
    Check(
        "primary", "Whether the server accepts writes",
        "A standby accepts none, so no job moves.",
        ("doctor_server",), server.primary,
    ),
    Check(
        "server_version", "PostgreSQL's version and its support",
        "Bugs that lose data are fixed only in supported versions.",
        ("doctor_server",), server.version,
    ),
    Check(
        "server_settings", "Settings of the server, the database and logins that harm",
        "Each of them loses jobs, or delays them.",
        ("doctor_settings", "doctor_server", "doctor_partitions"), settings.settings,
    ),
    Check(
        "encoding", "The encoding of the database",
        "Texts in other languages cannot be stored in every encoding.",
        ("doctor_server",), server.encoding,
    ),
    Check(
        "connections", "Connections in use and allowed",
        "A worker without connections does not start, and a producer without one fails.",
        ("doctor_server",), server.connections,
    ),
    Check(
        "pooler", "PgBouncer and similar poolers, and listen_dsn",
        "Behind a pooler notifications are lost, and jobs start up to five seconds late.",
        ("connection",), server.pooler,
    ),
    Check(
        "clock", "This machine's clock compared with the database's",
        "taskd uses the database's clock; people compare logs of two machines.",
        ("connection",), server.clock,
    ),
    Check(
        "clock_set_back", "Stored times that are still to come: the database's clock was set back",
        "What counts from such a time is late: retries, delayed jobs, fixed times of cron.",
        ("doctor_clock",), server.clock_set_back,
    ),
    Check(
        "wraparound", "The age of the oldest transaction id",
        "When transaction ids run out, the server accepts no more writes.",
        ("doctor_server",), server.wraparound,
    ),
    Check(
        "notify_queue", "How full the notification queue is, and who holds it back",
        "When it is nearly full, producers do not notify, so jobs start seconds late.",
        ("doctor_server", "doctor_listeners"), server.notify_queue,
    ),
    Check(
        "held_snapshots", "Transactions, prepared ones, slots and standbys that hold vacuum back",
        "Later dead rows cannot be removed, so claims read through more and more of them.",
        ("doctor_snapshots", "doctor_server"), storage.held_snapshots,
    ),
    Check(
        "table_locks", "Sessions that lock taskd's tables",
        "Claims and acks wait for them, and autovacuum gives up its work for them.",
        ("doctor_locks",), storage.table_locks,
    ),
    Check(
        "dead_tuples", "Dead rows of taskd's tables",
        "Each claim may have to skip them.",
        ("doctor_tables",), storage.dead_tuples,
    ),
    Check(
        "autovacuum", "Whether autovacuum runs on taskd's tables",
        "A queue makes two dead rows per job, and only vacuum removes them.",
        ("doctor_tables", "doctor_locks"), storage.autovacuum,
    ),
    Check(
        "index_bloat", "Indexes that are far larger than their contents",
        "What does not fit into memory is read from disk, at each claim.",
        ("doctor_indexes",), storage.index_bloat,
    ),
    Check(
        "invalid_indexes", "Indexes that are invalid",
        "They cost writes, and no query uses them.",
        ("doctor_indexes", "schema_objects"), storage.invalid_indexes,
    ),
    Check(
        "schema_version", "Migrations that are missing or unknown",
        "taskd's statements fit one schema version.",
        ("doctor_migrations", "known_migrations"), schema.version,
    ),
    Check(
        "environment", "Whether the database belongs to the environment of the settings",
        "A copy of production must not send production's mails.",
        ("doctor_environment", "setup"), schema.environment,
    ),
    Check(
        "objects", "Tables, columns, constraints, indexes, functions that are missing or changed",
        "taskd's guarantees depend on them as they were installed.",
        ("doctor_objects", "schema_objects", *_SCHEMA), schema.objects,
    ),
    Check(
        "sequences", "Sequences that are behind the rows which they count",
        "New jobs would get the ids of older ones, or be refused.",
        ("doctor_sequences",), schema.sequences,
    ),
    Check(
        "extra_objects", "Indexes, triggers and other objects that users have added",
        "Each adds work to every job.",
        ("doctor_objects", "schema_objects", *_SCHEMA), schema.extra_objects,
    ),
    Check(
        "publications", "Publications of taskd's tables, for logical replication",
        "PostgreSQL refuses a change that it cannot publish, and a subscriber stops at one that it "
        "cannot apply.",
        ("doctor_publications",), schema.publications,
    ),
    Check(
        "grants", "The rights of the roles of `taskd db roles`",
        "With too few, jobs stop; with too many, a leaked password does more harm.",
        ("doctor_grants", "grants_text", *_SCHEMA), schema.grants,
    ),
    Check(
        "logins", "The logins of workers",
        "The code of handlers can do everything that the worker's login can.",
        ("doctor_logins", "doctor_grants", "connection"), schema.logins,
    ),
    Check(
        "default_partition", "Finished jobs in the default partition of the history",
        "They block the partitions of their days, and are deleted one by one.",
        ("doctor_default",), schema.default_partition,
    ),
    Check(
        "partitions_ahead", "Partitions for jobs that end today and tomorrow",
        "Jobs without a partition go to the default partition.",
        ("doctor_partitions", "doctor_retentions"), schema.partitions_ahead,
    ),
    Check(
        "expired_partitions", "Expired partitions that still exist",
        "They take space, and can contain data that you promised to delete.",
        ("doctor_partitions",), schema.expired_partitions,
    ),
    Check(
        "unserved_queues", "Queues with due jobs and no live worker",
        "Their jobs do not run.",
        ("doctor_queues",), jobs.unserved_queues,
    ),
    Check(
        "unknown_tasks", "Waiting jobs whose task no worker of their queue knows",
        "They are released again and again, and do not run.",
        ("doctor_tasks",), jobs.unknown_tasks,
    ),
    Check(
        "paused", "Pauses that keep jobs waiting, or have lasted for more than a day",
        "Jobs wait until someone resumes the queue or the task.",
        ("doctor_queues", "doctor_tasks", "doctor_schedules"), jobs.paused,
    ),
    Check(
        "full_queues", "Queues and threads that are full of attempts that do not end",
        "Their other jobs wait until a slot is free.",
        ("doctor_queues", "doctor_workers", "doctor_running"), jobs.full_queues,
    ),
    Check(
        "failing_tasks", "Tasks whose attempts all fail",
        "Their jobs use up their attempts, and then fail for good.",
        ("doctor_workers",), jobs.failing_tasks,
    ),
    Check(
        "blocked_loops", "Workers whose event loop is blocked by handlers",
        "While it is blocked, no other job of this process runs, of any queue.",
        ("doctor_workers",), jobs.blocked_loops,
    ),
    Check(
        "workers", "Workers that do not renew their lease, do not end, or differ in version",
        "The jobs of a silent worker wait until it is declared dead.",
        ("doctor_workers",), jobs.workers,
    ),
    Check(
        "services", "Services of workers that fail again and again",
        "What such a service does for jobs is not done: rescue, promotion, schedules, upkeep.",
        ("doctor_services",), jobs.services,
    ),
    Check(
        "schedules", "Schedules that are overdue or failed",
        "Their jobs are not made.",
        ("doctor_schedules",), jobs.schedules,
    ),
    Check(
        "suspects", "Jobs whose worker crashed, and that wait in quarantine",
        "They start within seconds if a worker of their queue has a free slot.",
        ("doctor_stuck",), jobs.suspects,
    ),
    Check(
        "stuck_jobs", "Jobs that should have moved by now",
        "Each of them breaks a promise.",
        ("doctor_stuck", "doctor_queues"), jobs.stuck_jobs,
    ),
    Check(
        "limits", "Limits that block jobs, and depths that are not counted",
        "A limit that is not checked stops its jobs.",
        ("doctor_limits",), jobs.limits,
    ),
    Check(
        "keys", "Expired unique keys",
        "They take space.",
        ("doctor_keys",), jobs.keys,
    ),
)  # fmt: skip

CHECKS = (*SETUP, *DATABASE)


def statements(checks: tuple[Check, ...]) -> list[str]:
    """Return the statements that these checks need, in the order of the checks."""
    wanted = dict.fromkeys(name for check in checks for name in check.needs)
    return [name for name in wanted if name not in LOCAL]
