"""Names that other job queues use, and taskd's names for them, for errors about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_LIMIT = "limit=Limit(...)"

# Options of tasks.
TASK_OPTIONS: Mapping[str, str] = {
    "autoretry_for": "on_error={Error: Exponential()}",
    "bind": "a parameter ctx of the handler",
    "concurrency": _LIMIT,
    "default_retry_delay": "backoff=Fixed(seconds)",
    "job_timeout": "timeout_s, in seconds",
    "lock": "unique=Unique(...)",
    "max_retries": "max_attempts, which includes the first attempt",
    "queue_name": "queue",
    "queueing_lock": "unique=Unique(...)",
    "rate_limit": _LIMIT,
    "retries": "max_attempts, which includes the first attempt",
    "retry": "max_attempts and on_error",
    "retry_backoff": "backoff=Exponential(...)",
    "retry_delay": "backoff=Fixed(seconds)",
    "soft_time_limit": "timeout_s, in seconds",
    "time_limit": "timeout_s, in seconds",
    "timeout": "timeout_s, in seconds",
}

# Options of jobs.
JOB_OPTIONS: Mapping[str, str] = {
    "countdown": "delay_s, in seconds",
    "delay": "delay_s, in seconds",
    "eta": "run_at",
    "expires": "deadline_s, in seconds",
    "job_id": "unique=Unique(key)",
    "lock": "unique=Unique(key)",
    "max_retries": "max_attempts, which includes the first attempt",
    "queue_name": "queue",
    "queueing_lock": "unique=Unique(key)",
    "retries": "max_attempts, which includes the first attempt",
    "schedule_at": "run_at",
    "scheduled_at": "run_at",
    "task_id": "unique=Unique(key)",
    "timeout": "timeout_s, in seconds",
}

_ENQUEUE = "await {task}.enqueue(...), or {task}.enqueue_sync(...) without an event loop"
_OPTIONS = "{task}.options(delay_s=60).enqueue(...)"
_JOB = "{task}.job(...)"

# Methods of tasks.
TASK_METHODS: Mapping[str, str] = {
    "apply_async": f"{_ENQUEUE}; with options: {_OPTIONS}",
    "configure": _OPTIONS,
    "defer": _ENQUEUE,
    "defer_async": _ENQUEUE,
    "delay": _ENQUEUE,
    "kicker": _OPTIONS,
    "kiq": _ENQUEUE,
    "s": _JOB,
    "schedule": f"{_OPTIONS}; for a repeated job: schedule(name, {_JOB}, every('5m'))",
    "send": _ENQUEUE,
    "send_with_options": _OPTIONS,
    "si": _JOB,
    "signature": _JOB,
}


def unknown_option(where: str, name: str, known: Iterable[str], words: Mapping[str, str]) -> str:
    """Return a sentence about an option that does not exist; if possible, name taskd's option."""
    near = difflib.get_close_matches(name, list(known), n=1)
    if name in words:
        hint = f"taskd calls it {words[name]}"
    elif near:
        hint = f"did you mean {near[0]}?"
    else:
        hint = f"it has {', '.join(sorted(known))}"
    return f"{where} has no option {name!r}: {hint}"
