"""Events of workers, their processes and their HTTP endpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from taskd.core.jobs.job import Job
from taskd.events.stream import emit, job_fields


def worker_started(worker_id: int, queues: Mapping[str, int], **facts: Any) -> None:
    """This process has registered as a worker, at its start or after it was declared dead."""
    emit("worker.started", "info", worker_id=str(worker_id), queues=dict(queues), **facts)


def worker_ready(queues: Sequence[str]) -> None:
    """The worker has started and claims jobs."""
    emit("worker.ready", "info", queues=list(queues))


def worker_draining(why: str, running: int, released: int) -> None:
    """The worker drains: it claims no more jobs, and lets running attempts finish."""
    emit("worker.draining", "info", why=why, running=running, released=released)


def worker_stopped(**report: Any) -> None:
    """The worker has stopped; the fields are its drain report."""
    emit("worker.stopped", "info", **report)


def worker_crashed(process: int, pid: int, code: int, delay_s: float) -> None:
    """A worker process ended unexpectedly; a new one starts after `delay_s` (if 0, none starts)."""
    ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    emit("worker.crashed", "error", process=process, pid=pid, ended=ended, delay_s=delay_s)


def worker_not_started(process: int, error: OSError, delay_s: float) -> None:
    """A worker process could not be started; the parent retries if other processes run."""
    text = f"{type(error).__name__}: {error}"
    emit("worker.not_started", "error", process=process, error=text, delay_s=delay_s)


def worker_quiet(quiet: bool) -> None:
    """A signal has paused claiming (`quiet` is true) or resumed it."""
    emit("worker.quiet", "info", quiet=quiet)


def worker_reloaded(limits: Mapping[str, int]) -> None:
    """The worker has read its settings again, after SIGHUP."""
    emit("worker.reloaded", "info", queues=dict(limits))


def queues_changed(served: Sequence[str], left: Sequence[str]) -> None:
    """The worker now serves further queues, or no longer serves some (`left`).

    This happens after SIGHUP, or after a queue that matches a pattern has appeared.
    """
    emit("queues.changed", "info", served=list(served), left=list(left))


def worker_declared_dead(worker_id: int) -> None:
    """Another worker declared this worker dead: this worker drops its jobs and registers again."""
    emit("worker.declared_dead", "error", worker_id=str(worker_id))


def worker_fenced(silent_s: float) -> None:
    """The lease is overdue: attempts are cancelled before other workers rescue the jobs."""
    emit("worker.fenced", "error", silent_s=round(silent_s, 1))


def lease_thread_ended(error: BaseException | None) -> None:
    """The thread that renews the lease has ended unexpectedly: the worker stops."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    emit("lease.thread_ended", "error", error=text)


def worker_threads_lost(lost: int, threads: int, tasks: Mapping[str, int]) -> None:
    """A function ignored its timeout and keeps its thread; `tasks`: lost threads by task.

    Only a restart of the process frees these threads, unless the functions return.
    """
    emit("worker.threads_lost", "error", lost=lost, threads=threads, tasks=dict(tasks))


def worker_thread_returned(job: Job, after_s: float) -> None:
    """An abandoned function has returned, `after_s` after its start; its thread is free."""
    emit("worker.thread_returned", "info", **job_fields(job), after_s=round(after_s, 1))


def workers_declared_dead(workers: Sequence[str], proof: str) -> None:
    """This worker declared other workers dead, and rescues their jobs."""
    emit("workers.declared_dead", "warning", workers=list(workers), proof=proof)


def loop_blocked(blocked_s: float, job: Job | None, stack: str, suppressed: int) -> None:
    """The event loop is blocked, by `job_id` if that is known; `suppressed`: unlogged blockages."""
    emit(
        "loop.blocked",
        "warning",
        blocked_s=round(blocked_s, 2),
        **job_fields(job),
        suppressed=suppressed,
        stack=stack,
    )


def loop_unblocked(blocked_s: float, job: Job | None) -> None:
    """The event loop is no longer blocked."""
    emit("loop.unblocked", "info", blocked_s=round(blocked_s, 2), **job_fields(job))


def loop_stopped() -> None:
    """Code of the app, outside of a handler, has stopped the event loop; the worker goes on."""
    emit("loop.stopped", "error")


def worker_stuck(job: Job | None, running: int, released: int, stack: str) -> None:
    """A stop took too long, and the event loop does not respond: the process exits now."""
    emit(
        "worker.stuck", "error", **job_fields(job), running=running, released=released, stack=stack
    )


ServiceError = Callable[[str, BaseException | str], object]
_on_service_error: list[ServiceError] = []


def on_service_error(callback: ServiceError) -> Callable[[], None]:
    """Call `callback(service, error)` for each later service.crashed and service.failing.

    For a crash, `error` is the exception itself, which the event does not contain. The callback can
    be called in any thread. Return a function that ends the calls.
    """
    _on_service_error.append(callback)
    return lambda: _on_service_error.remove(callback)


def service_crashed(service: str, error: BaseException, crashes: int, delay_s: float) -> None:
    """A service of the worker raised an error, and is restarted."""
    emit(
        "service.crashed",
        "error",
        service=service,
        crashes=crashes,
        delay_s=round(delay_s, 2),
        error=f"{type(error).__name__}: {error}",
    )
    for callback in tuple(_on_service_error):
        callback(service, error)


def service_failing(service: str, error: str, failures: int, for_s: float) -> None:
    """A service or an upkeep step has failed repeatedly for 10 s, although PostgreSQL answers.

    Logged once; `taskd doctor` and `taskd workers` show the failure until it ends.
    """
    emit(
        "service.failing",
        "error",
        service=service,
        error=error,
        failures=failures,
        for_s=round(for_s, 1),
    )
    for callback in tuple(_on_service_error):
        callback(service, error)


def service_recovered(service: str, for_s: float) -> None:
    """A service that failed repeatedly works again."""
    emit("service.recovered", "info", service=service, for_s=round(for_s, 1))


def http_listening(address: str) -> None:
    """HTTP requests are served at this address."""
    emit("http.listening", "info", address=address)


def request_failed(method: str, path: str, error: BaseException, times: int) -> None:
    """HTTP requests failed because of a bug in taskd; `times` includes earlier, unlogged failures.

    The responses had the status 500.
    """
    text = f"{type(error).__name__}: {error}"
    emit("request.failed", "error", method=method, path=path[:200], error=text, times=times)


def figures_delayed(error: str) -> None:
    """The metrics of the database could not be read for a scrape; logged once per outage."""
    emit("figures.delayed", "warning", error=error)


def login_accepted(who: str, address: str) -> None:
    """A user logged in to the dashboard."""
    emit("login.accepted", "info", who=who, address=address)


def login_refused(who: str, address: str, why: str, times: int) -> None:
    """A login to the dashboard was refused; `times` includes earlier, unlogged refusals."""
    emit("login.refused", "warning", who=who[:100], address=address[:100], why=why, times=times)


def action_taken(action: str, who: str, target: str, jobs: int, job_ids: Sequence[int]) -> None:
    """A dashboard user ran `action` on `jobs` jobs."""
    ids = list(job_ids)[:20]
    emit("action.taken", "info", action=action, who=who, target=target, jobs=jobs, job_ids=ids)


def task_replaced(name: str, by: str) -> None:
    """A task of the app replaces the built-in task of the same name."""
    emit("task.replaced", "info", task=name, by=by)


def app_import_slow(app: str, waits_s: float, at: str, hint: str) -> None:
    """The import of the app takes long; `at` is the line that is being executed."""
    emit("app.import_slow", "warning", app=app, waits_s=round(waits_s, 1), at=at, hint=hint)
