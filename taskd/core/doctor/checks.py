"""The checks of `taskd doctor`, in the order in which they run."""

from __future__ import annotations

from taskd.core.doctor import jobs, schema, server, settings, setup, storage, workers
from taskd.core.doctor.finding import Check

# Facts that the command collects itself, without a statement.
LOCAL = ("setup", "reach", "connection", "known_migrations", "schema_objects", "grants_text")
_SCHEMA = ("known_migrations", "doctor_migrations")

SETUP = (
    Check(
        "settings", "Settings in files and environment variables",
        "A setting with a wrong name has no effect, and is easily overlooked.",
        ("setup",), setup.settings,
    ),
    Check(
        "dsn", "The DSN, and where it was found",
        "A worker sees only the jobs of its own database.",
        ("setup",), setup.dsn,
    ),
    Check(
        "embedded", "The embedded PostgreSQL, if it is in use",
        "Without a DSN, all jobs are stored there.",
        ("setup",), setup.embedded,
    ),
)  # fmt: skip

DATABASE = (
    Check(
        "reach", "Whether taskd can connect to the database",
        "No job runs without the database.",
        ("reach",), setup.reach,
    ),
    Check(
        "primary", "Whether the server accepts writes",
        "A standby accepts none, so no job can be enqueued or claimed.",
        ("doctor_server",), server.primary,
    ),
    Check(
        "server_version", "PostgreSQL's version and its support",
        "Bugs that lose data are fixed only in supported versions.",
        ("doctor_server",), server.version,
    ),
    Check(
        "server_settings", "Harmful settings of the server, the database and logins",
        "Each of them can lose or delay jobs, or make transactions fail.",
        ("doctor_settings", "doctor_server", "doctor_partitions"), settings.settings,
    ),
    Check(
        "encoding", "The encoding of the database",
        "An encoding other than UTF8 lacks the characters of many languages.",
        ("doctor_server",), server.encoding,
    ),
    Check(
        "connections", "Connections in use and allowed",
        "Without a free connection, workers do not start and producers fail.",
        ("doctor_server",), server.connections,
    ),
    Check(
        "worker_connections", "Connections that the live workers hold, and open when busy",
        "A busy worker that gets no further connection writes outcomes and claims in turn.",
        ("doctor_server", "doctor_workers"), server.worker_connections,
    ),
    Check(
        "pooler", "PgBouncer and similar poolers, and listen_dsn",
        "A pooler loses notifications, so jobs start up to six seconds late.",
        ("connection",), server.pooler,
    ),
    Check(
        "clock", "This machine's clock compared with the database's",
        "taskd uses the database's clock, but log lines have the time of this machine.",
        ("connection",), server.clock,
    ),
    Check(
        "clock_set_back", "Stored times that are later than now: the database's clock was set back",
        "Retries and delayed jobs start late if their due time was computed from such a time.",
        ("doctor_clock",), server.clock_set_back,
    ),
    Check(
        "wraparound", "The age of the oldest transaction id or multixact id",
        "When these ids run out, the server accepts no more writes.",
        ("doctor_server",), server.wraparound,
    ),
    Check(
        "notify_queue", "How full the notification queue is, and which session may hold it back",
        "When the queue is nearly full, producers do not notify, so jobs start seconds late.",
        ("doctor_server", "doctor_listeners"), server.notify_queue,
    ),
    Check(
        "held_snapshots", "Transactions, replication slots and standbys that hold vacuum back",
        "They hold old snapshots: vacuum keeps rows that died later, so tables and indexes grow.",
        ("doctor_snapshots", "doctor_server"), storage.held_snapshots,
    ),
    Check(
        "table_locks", "Sessions that lock taskd's tables",
        "Claims and acks wait for such locks, and autovacuum skips the table.",
        ("doctor_locks",), storage.table_locks,
    ),
    Check(
        "dead_tuples", "Tables of taskd with many dead rows",
        "Statements have to skip dead rows, and tables and indexes grow.",
        ("doctor_tables",), storage.dead_tuples,
    ),
    Check(
        "autovacuum", "Whether autovacuum runs on taskd's tables",
        "Each job leaves two or more dead rows, and only vacuum removes them.",
        ("doctor_tables", "doctor_locks"), storage.autovacuum,
    ),
    Check(
        "index_bloat", "Indexes that are far larger than their contents",
        "If an index does not fit into memory, claims read from the disk.",
        ("doctor_indexes",), storage.index_bloat,
    ),
    Check(
        "invalid_indexes", "Indexes that are invalid",
        "Writes still update most invalid indexes, but no query uses them.",
        ("doctor_indexes", "schema_objects"), storage.invalid_indexes,
    ),
    Check(
        "schema_version", "Migrations that are missing or unknown",
        "Workers do not start if the schema is too old or too new for them.",
        ("doctor_migrations", "known_migrations"), schema.version,
    ),
    Check(
        "environment", "Whether the database belongs to the environment of the settings",
        "A copy of production must not send production's mails.",
        ("doctor_environment", "setup"), schema.environment,
    ),
    Check(
        "objects", "Tables, indexes, functions and other objects that are missing or were changed",
        "taskd's guarantees depend on these objects.",
        ("doctor_objects", "schema_objects", *_SCHEMA), schema.objects,
    ),
    Check(
        "sequences", "Sequences whose value is lower than the stored rows require",
        "New jobs would get ids that are in use, or enqueues would skip depth limits and "
        "notifications.",
        ("doctor_sequences",), schema.sequences,
    ),
    Check(
        "extra_objects", "Indexes, triggers and other objects that users have added",
        "Each of them can slow taskd's statements down, or change what the statements do.",
        ("doctor_objects", "schema_objects", *_SCHEMA), schema.extra_objects,
    ),
    Check(
        "publications", "Publications of taskd's tables, for logical replication",
        "PostgreSQL refuses changes that it cannot publish, and a subscriber stops at a change "
        "that it cannot apply.",
        ("doctor_publications",), schema.publications,
    ),
    Check(
        "grants", "The rights of the roles of `taskd db roles`",
        "Jobs stop if rights are missing; rights that are not needed help an attacker.",
        ("doctor_grants", "grants_text", *_SCHEMA), schema.grants,
    ),
    Check(
        "logins", "The logins of workers",
        "Handlers can do everything that the worker's login is allowed to do.",
        ("doctor_logins", "doctor_grants", "connection"), schema.logins,
    ),
    Check(
        "default_partition", "Finished jobs in the default partition of the history",
        "PostgreSQL then refuses to create their partition, and deleting the rows one by one costs "
        "more than dropping a partition.",
        ("doctor_default",), schema.default_partition,
    ),
    Check(
        "partitions_ahead", "Partitions of the history for jobs that end today and tomorrow",
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
        "Workers claim and release these jobs repeatedly, and do not run them.",
        ("doctor_tasks",), jobs.unknown_tasks,
    ),
    Check(
        "unfit_arguments", "Waiting jobs whose arguments do not fit the code of their task",
        "Workers claim and release these jobs repeatedly, and do not run them.",
        ("doctor_unfit",), jobs.unfit_arguments,
    ),
    Check(
        "paused", "Pauses that keep jobs waiting, or have lasted for more than a day",
        "The jobs wait until the pause ends.",
        ("doctor_queues", "doctor_tasks", "doctor_schedules"), jobs.paused,
    ),
    Check(
        "full_queues", "Queues and thread pools that are full of long attempts",
        "Other jobs wait until a slot or a thread is free.",
        ("doctor_queues", "doctor_workers", "doctor_running"), workers.full_queues,
    ),
    Check(
        "abandoned_attempts", "Attempts that ignore their timeout, and lost threads",
        "These workers do not start the jobs again, and have fewer threads for other jobs.",
        ("doctor_workers",), workers.abandoned_attempts,
    ),
    Check(
        "failing_tasks", "Tasks whose recent attempts have all failed",
        "A job that has used up its attempts is not retried.",
        ("doctor_workers",), workers.failing_tasks,
    ),
    Check(
        "blocked_loops", "Workers whose event loop is blocked for long",
        "While the event loop is blocked, the process starts and ends no job of any queue.",
        ("doctor_workers",), workers.blocked_loops,
    ),
    Check(
        "workers", "Workers with an expired lease, draining workers, and different versions",
        "The jobs of a worker whose lease has expired wait until another worker declares it dead.",
        ("doctor_workers",), workers.workers,
    ),
    Check(
        "apps", "Apps that share a name, and tasks that two apps define differently",
        "When an app starts, it replaces the published tasks of any other app of its name.",
        ("doctor_apps", "doctor_contested"), workers.apps,
    ),
    Check(
        "services", "Services of workers that fail repeatedly",
        "While a service fails, its work is not done, such as rescue, promotion or schedules.",
        ("doctor_services",), workers.services,
    ),
    Check(
        "schedules", "Schedules that are overdue, withdrawn or failed",
        "Jobs of these schedules are late or missing.",
        ("doctor_schedules",), jobs.schedules,
    ),
    Check(
        "suspects", "Jobs that wait in quarantine because their worker died",
        "Workers normally start these jobs within seconds. If the jobs wait longer, their queue "
        "may have no worker with a free slot.",
        ("doctor_stuck",), jobs.suspects,
    ),
    Check(
        "stuck_jobs", "Jobs that have stayed in their state for too long",
        "Workers normally prevent each of these cases, or end it within seconds.",
        ("doctor_stuck", "doctor_queues", "doctor_workers"), jobs.stuck_jobs,
    ),
    Check(
        "limits", "Limits that block jobs without need, and outdated depths of queues",
        "The blocked jobs could run, but wait until a worker checks the limit again.",
        ("doctor_limits", "doctor_workers"), jobs.limits,
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
