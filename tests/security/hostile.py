"""A database in which every text that other people choose is an attack on its reader."""

from __future__ import annotations

import json
import re
from typing import Any

# A title, a cleared screen, a bell, a colour by C1, a text turned around, and ends of lines.
TEXT = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066\u2028\u2029\x85\r\x08y"
# Names of tasks, keys, limits, schedules and workflows have no C0 and C1 characters, but others.
NAME = "x\u202eowned\u2066\u2028\u2029y"
# What the commands themselves write: colours and styles, and on a screen: moves of the cursor.
STYLES = re.compile(r"\x1b\[[\d;]*m|\x1b\[\d+;1H|\x1b\[2J|\x1b\[\?\d+[hl]")


def unprintable(written: str) -> list[str]:
    """The characters that steer a terminal, without those of the commands' own styles."""
    return [c for c in STYLES.sub("", written) if not c.isprintable() and c not in "\n\t"]


def fill(taskd: Any, text: str = TEXT, name: str = NAME) -> dict[str, int]:
    """Write the text wherever a producer, a worker or another operator can write one."""
    error = {"attempt": 1, "worker": text, "type": text, "message": text, "traceback": text}
    taskd.publish()
    taskd.sql(
        "UPDATE taskd.task SET app = $1, module = $1, paused_at = now(), pause_reason = $1", text
    )
    taskd.worker(7, "email")
    taskd.worker(8, "email", died="1 hour")
    taskd.sql(
        "UPDATE taskd.worker SET host = $1, app = $1, version = $1, failures = $2::text::jsonb",
        text,
        json.dumps([{"service": text, "error": text, "since": 1790000000}]),
    )
    insert = (
        "INSERT INTO taskd.job (queue, task, args, unique_key, limit_name, limit_key, state, gate) "
        "VALUES ('email', $1::text, $2::text::jsonb, $3, $1::text, $4, "
        "$5::text::taskd.job_state, NULL) "
        "RETURNING id"
    )
    args = json.dumps({text: text})
    waiting, running, failed, retrying = (
        taskd.sql(insert, name, args, f"{name}{n}", text, "queued")[0]["id"] for n in range(4)
    )
    taskd.sql(
        "UPDATE taskd.job SET state = 'running', worker_id = 7, attempt = 1, fence = 1, "
        "started_at = now() - interval '1 h' WHERE id = $1",
        running,
    )
    taskd.sql("INSERT INTO taskd.progress VALUES ($1, 1, 1, 4, $2)", running, text)
    taskd.sql(
        "UPDATE taskd.job SET state = 'scheduled', attempt = 1, fence = 1, "
        "errors = $2::text::jsonb, run_at = now() + interval '1 h' WHERE id = $1",
        retrying,
        json.dumps([error]),
    )
    taskd.finish(failed, "failed", reason=text, errors=json.dumps([error]))
    line = {"at": text, "level": text, "text": text, "logger": text, "fields": {text: text}}
    taskd.sql(
        "INSERT INTO taskd.job_log (job_id, fence, worker_id, expires_at, attempt, ended, first, "
        "left_out, lines) VALUES ($1, 1, 1, now() + interval '1 day', 1, true, 1, 5, "
        "$2::text::jsonb)",
        failed,
        json.dumps([line | {"traceback": text}]),
    )
    taskd.sql(
        "INSERT INTO taskd.queue (name, paused_at, pause_reason) VALUES ('q', now(), $1)", text
    )
    taskd.sql("INSERT INTO taskd.job_limit (name, concurrency) VALUES ($1, 1)", name)
    taskd.sql(
        "INSERT INTO taskd.schedule (name, task, queue, every_s, starts_at, app, last_error, "
        "last_error_at, withdrawn_at) "
        "VALUES ($1::text, $1::text, 'email', 60, now(), $2, $2, now(), now())",
        name,
        text,
    )
    run_id, part = taskd.sql(
        """
        SELECT taskd.enqueue_workflow($1::text, 'pipeline', $2::text::jsonb, ARRAY[$1::text],
            '{email}', '{"{}"}', '{100}',
            '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}',
            '{NULL}', '{NULL}', '{NULL}', ARRAY[$3], '{}', '{}', '{}', '{}')
        """,
        name,
        json.dumps([{"name": text, "task": text}, {"name": f"{text}2", "task": text}]),
        text,
    )[0][0]
    return {
        "waiting": waiting, "running": running, "failed": failed, "retrying": retrying,
        "workflow": run_id, "part": part,
    }  # fmt: skip
