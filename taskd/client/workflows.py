"""Make and start workflows and pipelines."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from taskd.client import traces
from taskd.client.client import Client
from taskd.client.default import default_client
from taskd.client.enqueueing import BuiltIns, completed
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import Unique
from taskd.core.tasks import registry as registries
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import PipelinePlan, Registry
from taskd.core.tasks.task import Task
from taskd.core.workflows.stages import Stage, check_stages, key_of_run
from taskd.core.workflows.workflow import (
    Node,
    OnFailed,
    Plan,
    check_name,
    check_node,
    node_name,
    numbered,
    plan,
)
from taskd.errors import InvalidWorkflow
from taskd.store import workflows as stored
from taskd.store.connections.statements import Fetches


@dataclass(frozen=True, slots=True)
class Started:
    """A workflow that was started.

    Attributes:
        id: the id of the workflow.
        jobs: maps the name of each node to the id of its job, which `client.result()` accepts.
        outcome: `enqueued`. For a run of a pipeline with a unique key, it can also be `skipped`,
            `replaced`, `follows` or `ignored`, as for jobs. Then `id` and `jobs` can be those of
            another run.
    """

    id: int
    jobs: dict[str, int]
    outcome: str = "enqueued"


Writing = Callable[[Fetches, BuiltIns], Coroutine[Any, Any, Started]]


class Startable:
    """A plan that can be enqueued as one workflow."""

    def _plan(self) -> Plan:
        raise NotImplementedError

    async def _write(self, plan: Plan, client: Client | None, conn: object) -> Started:
        return await (client or default_client()).using(_writing(plan), conn)

    def _write_sync(self, plan: Plan, client: Client | None, conn: object) -> Started:
        return (client or default_client()).using_sync(_writing(plan), conn)


def _writing(plan: Plan) -> Callable[[Fetches, BuiltIns], Coroutine[Any, Any, Started]]:
    async def write(on: Fetches, built_ins: BuiltIns) -> Started:
        # Jobs of a workflow do not get the unique key of their task. If another job held the key,
        # a job of the workflow would be missing.
        parts = [node.job for node in plan.nodes]
        without_key = [job if job.checked else replace(job, no_key=True) for job in parts]
        jobs = await completed(on, without_key, built_ins)
        workflow_id, *ids = await traces.traced(partial(stored.start, on, plan), jobs)
        names = [node.name for node in plan.nodes]
        return Started(workflow_id, dict(zip(names, ids, strict=True)))

    return write


def _keyed(
    plan: Plan, unique: Unique
) -> Callable[[Fetches, BuiltIns], Coroutine[Any, Any, Started]]:
    async def write(on: Fetches, built_ins: BuiltIns) -> Started:
        [node] = plan.nodes
        jobs = await completed(on, [node.job], built_ins)
        run_id, job_id, outcome = await traces.traced(
            partial(stored.start_keyed_run, on, plan, unique), jobs
        )
        return Started(run_id or 0, {node.name: job_id}, outcome)

    return write


class Workflow(Startable):
    """A set of jobs, some of which wait for others. start() enqueues all of them.

    Args:
        name: 1 to 100 bytes; several workflows can have the same name.

    Raises:
        InvalidWorkflow: the name is not valid.
    """

    def __init__(self, name: str) -> None:
        self.name = check_name(name)
        self._nodes: dict[str, Node] = {}
        self._callbacks: list[tuple[str, NewJob, OnFailed]] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._nodes) + len(self._callbacks)

    def add(
        self,
        job: NewJob,
        *,
        name: str | None = None,
        after: Iterable[str | int] = (),
        on_failed: str = OnFailed.CANCEL,
    ) -> str:
        """Add a job; return the name of its node.

        Args:
            job: made by `task.job(...)`.
            name: the name of the job's node; by default the name of its task, with a number if that
                name is taken.
            after: the parents of this job, which it waits for: names of nodes, or ids of existing
                jobs. A node can be named here before it is added. In the handler, `ctx.results()`
                returns the results of the parents.
            on_failed: what happens to this job if a parent fails or is cancelled; a value of
                OnFailed.

        Raises:
            InvalidWorkflow: the name is taken or not valid, `after` is not a list, or `on_failed`
                is not a value of OnFailed.
        """
        if name is None:
            name = self._free(node_name(job.task))
        return self._put(check_node(name), job, after, on_failed)

    def _put(self, name: str, job: NewJob, after: Iterable[str | int], on_failed: str) -> str:
        if self._taken(name):
            raise InvalidWorkflow(f"workflow {self.name}: two jobs are named {name!r}")
        if isinstance(after, str | int):
            raise InvalidWorkflow(f"after={after!r} is not a list: write after=[{after!r}]")
        self._nodes[name] = Node(name, job, tuple(dict.fromkeys(after)), _policy(on_failed))
        return name

    def on_success(self, job: NewJob) -> None:
        """Run this job when all jobs that were added with add() are done."""
        self._callbacks.append(("on_success", job, OnFailed.CANCEL))

    def on_failure(self, job: NewJob) -> None:
        """Run this job once, when the first job that was added with add() fails or is cancelled."""
        self._callbacks.append(("on_failure", job, OnFailed.ONLY))

    def on_completion(self, job: NewJob) -> None:
        """Run this job when all jobs that were added with add() are done, failed or cancelled."""
        self._callbacks.append(("on_completion", job, OnFailed.CONTINUE))

    async def start(self, *, conn: object = None, client: Client | None = None) -> Started:
        """Enqueue all jobs of the workflow with one statement. If it fails, no job is enqueued.

        Args:
            conn: the caller's connection, as `Client.enqueue` takes it.
            client: replaces the default client.

        Raises:
            InvalidWorkflow: the workflow has a cycle, an unknown name, too many jobs, or a job with
                a unique key.
            JobNotFound: `after` contains an id that no live or finished job has.
            As Client.enqueue().
        """
        return await self._write(self._plan(), client, conn)

    def start_sync(self, *, conn: object = None, client: Client | None = None) -> Started:
        """Start like start(), for code without an event loop; `conn` is a blocking connection."""
        return self._write_sync(self._plan(), client, conn)

    def _taken(self, name: str) -> bool:
        # Called for each of up to 20,000 nodes, so this must not loop over the nodes.
        return name in self._nodes or any(name == each for each, _, _ in self._callbacks)

    def _free(self, base: str) -> str:
        """Return this name, with a number appended if the name is taken."""
        name = base
        while self._taken(name):
            number = self._numbers[base] = self._numbers.get(base, 1) + 1
            name = f"{base}-{number}"
        return name

    def nodes(self) -> list[Node]:
        """Return the jobs, and those of the callbacks, each with the jobs that it waits for."""
        names = numbered([*self._nodes, *(name for name, _, _ in self._callbacks)])
        every = tuple(self._nodes)
        calls = [
            Node(name, job, every, on_failed)
            for name, (_, job, on_failed) in zip(names[len(every) :], self._callbacks, strict=True)
        ]
        return [*self._nodes.values(), *calls]

    def _plan(self) -> Plan:
        return plan(self.name, self.nodes())


def chain(*jobs: NewJob, name: str = "chain", on_failed: str = OnFailed.CANCEL) -> Workflow:
    """Make a workflow of jobs that run one after another, each when the previous job is done.

    Results are not passed on as arguments: a job reads the result of the previous job with
    `ctx.results()`. In contrast, the stages of a pipeline() get results as arguments.

    Args:
        name: name of the workflow.
        on_failed: what happens to the next job when a job fails or is cancelled; a value of
            OnFailed.

    Raises:
        InvalidWorkflow: a name or `on_failed` is not valid.
    """
    made = Workflow(name)
    last: str | None = None
    for job in jobs:
        last = made.add(job, after=[] if last is None else [last], on_failed=on_failed)
    return made


def group(
    jobs: Iterable[NewJob],
    *,
    then: NewJob | None = None,
    name: str = "group",
    on_failed: str = OnFailed.CANCEL,
) -> Workflow:
    """Make a workflow of jobs that run in parallel, and a last job that starts when all are done.

    The jobs that run in parallel are the members of the group. Their nodes are named by task and
    index: `send[0]`, `send[1]`. In the last job, `ctx.results()` returns the results of the members
    in this order.

    Args:
        jobs: the members.
        then: the last job, or None.
        name: name of the workflow.
        on_failed: what happens to the last job when a member fails or is cancelled; a value of
            OnFailed.

    Raises:
        InvalidWorkflow: a name or `on_failed` is not valid.
    """
    made = Workflow(name)
    members = [
        made._put(f"{node_name(job.task)}[{n}]", job, (), OnFailed.CANCEL)  # noqa: SLF001
        for n, job in enumerate(jobs)
    ]
    if then is not None:
        made.add(then, after=members, on_failed=on_failed)
    return made


def stage(
    name: str,
    task: Task[..., Any],
    *,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    timeout_s: float | None = None,
    no_key: bool = False,
) -> tuple[Stage, Task[..., Any]]:
    """Make a stage of a pipeline.

    Args:
        name: the name of the stage. A handler that returns `Next(name)` chooses this stage.
        task: the task whose handler the stage runs.
        queue, priority, max_attempts, timeout_s: replace the options of the task.
        no_key: the unique key that the task declares does not apply to the stage.

    Raises:
        InvalidWorkflow: the name is not valid.
        InvalidJob: an option is outside its limits.
    """
    check_node(name)
    sample = NewJob(
        task.name,
        queue=queue or task.queue,
        priority=task.priority if priority is None else priority,
        max_attempts=max_attempts,
        timeout_s=timeout_s,
    )
    required, accepted = task.parameters()
    alone = required if len(required) == 1 else accepted if len(accepted) == 1 else ()
    made = Stage(
        name,
        task.name,
        sample.queue or task.queue,
        alone[0] if alone else None,
        required,
        accepted,
        task.priority if priority is None else priority,
        max_attempts,
        timeout_s,
        task.versions.stored,
        no_key,
    )
    return made, task


class Pipeline(Startable):
    """Named stages, each of which gets the result of the previous stage as arguments."""

    def __init__(
        self,
        name: str,
        stages: Sequence[tuple[Stage, Task[..., Any]]],
        unique: Unique | None = None,
    ) -> None:
        self.name = check_name(name)
        self.stages = tuple(made for made, _ in stages)
        check_stages(name, self.stages, [_returns(task) for _, task in stages])
        self._tasks = [task for _, task in stages]
        self.queue = self.stages[0].queue
        declared = [task.unique for task in self._tasks]
        self._rule = key_of_run(name, self.stages, declared, unique)
        if self._rule is not None:
            self._tasks[0].check_key(self._rule)

    def job(self, *args: Any, **kwargs: Any) -> NewJob:
        """Return a run of the pipeline as a value, for schedule() and Client.enqueue().

        The value contains only the name of the pipeline and the arguments. So a worker of the app
        must have published the pipeline. `enqueue` returns the id of the job of the first stage.

        Args:
            args, kwargs: the arguments of the first stage's handler.

        Raises:
            InvalidArgs: the arguments do not fit the task of the first stage.
        """
        return NewJob(self.name, self._tasks[0].encode(*args, **kwargs))

    def plan(self) -> PipelinePlan:
        """Return what workers publish about the pipeline."""
        first, task = self.stages[0], self._tasks[0]
        return PipelinePlan(
            self.name,
            task,
            first.queue,
            first.priority,
            first.max_attempts or task.max_attempts,
            first.timeout_s or task.timeout_s,
            None if self._rule is None else task.rule_of(self._rule),
            self._stages_text(),
        )

    async def start(
        self,
        *args: Any,
        stage: str | None = None,
        conn: object = None,
        client: Client | None = None,
        **kwargs: Any,
    ) -> Started:
        """Start a run: enqueue the job of the first stage, or of `stage`, with these arguments.

        The stages are stored with the run, so a later deploy does not change this run.

        Args:
            args, kwargs: the arguments of the stage's handler.
            stage: the name of the stage with which the run starts; by default the first stage.
            conn: the caller's connection, as `Client.enqueue` takes it.
            client: replaces the default client.

        Raises:
            InvalidArgs: the arguments do not fit the task of the stage.
            InvalidWorkflow: the pipeline has no such stage.
            As Client.enqueue().
        """
        plan, writing = self._writing(stage, args, kwargs)
        return await (client or default_client()).using(writing(plan), conn)

    def start_sync(
        self,
        *args: Any,
        stage: str | None = None,
        conn: object = None,
        client: Client | None = None,
        **kwargs: Any,
    ) -> Started:
        """Start like start(), for code without an event loop; `conn` is a blocking connection."""
        plan, writing = self._writing(stage, args, kwargs)
        return (client or default_client()).using_sync(writing(plan), conn)

    def _writing(
        self, stage: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan, Callable[[Plan], Writing]]:
        plan = self._run(stage, args, kwargs)
        if self._rule is None:
            return plan, _writing
        if stage not in (None, self.stages[0].name):
            raise InvalidWorkflow(
                f"pipeline {self.name}: its runs have a unique key, which the arguments of the "
                f"first stage make: start the run there, or start an ended run at {stage!r} with "
                "client.restart_runs()"
            )
        unique = self._tasks[0].keyed(self._rule, plan.nodes[0].job.args)
        return plan, partial(_keyed, unique=unique)

    def _run(self, stage: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        names = [each.name for each in self.stages]
        if stage is not None and stage not in names:
            raise InvalidWorkflow(
                f"pipeline {self.name}: it has no stage {stage!r}; its stages are "
                f"{', '.join(names)}"
            )
        place = 0 if stage is None else names.index(stage)
        first, task = self.stages[place], self._tasks[place]
        text = task.encode(*args, **kwargs)
        job = NewJob(
            first.task,
            text,
            queue=first.queue,
            priority=first.priority,
            max_attempts=first.max_attempts,
            timeout_s=first.timeout_s,
            checked=True,
            args_version=first.args_version,
            limit=task.limit_of(text),
            metadata=task.metadata,
        )
        node = Node(first.name, job)
        return Plan(self.name, "pipeline", [node], stages=self._stages_text())

    def _stages_text(self) -> str:
        return msgspec.json.encode(self.stages).decode()


def pipeline(
    name: str,
    *stages: tuple[Stage, Task[..., Any]],
    unique: Unique | None = None,
    registry: Registry | None = registries.DEFAULT,
) -> Pipeline:
    """Make a pipeline of named stages, in which the result of a stage is passed to the next stage.

    If a result is a dict, its items are the arguments of the next stage by name. If the result is
    None, the next stage gets no arguments. Any other result becomes the only required argument of
    the next stage. If the next stage does not have exactly one required argument, the result
    becomes its only argument. A handler that returns `Next("stage", **args)` chooses another stage,
    even an earlier stage. A handler that returns `Stop(result)` ends the run.

    The workers of the app publish the pipeline when they start. Then any producer can start a run
    by the name of the pipeline, in the same way as a job by the name of its task.

    Args:
        name: name of the pipeline and of each run; no task of the app can have this name.
        stages: made by stage(), in their order.
        unique: the unique key of a run, made of the arguments of the first stage. The default is
            the key of the task of the first stage. At most one run of a key is live. If the key has
            a version, the newest run wins: no further stage of an older run begins.
        registry: where the pipeline is declared. With None, workers do not publish the pipeline,
            and only code that has the returned object can start runs.

    Raises:
        InvalidWorkflow: there is no stage, or two stages have the same name. Or a stage returns a
            type that the next stage does not accept. Or a unique key would have no effect.
        TypeError: the unique key uses an argument that the first stage does not have.
        ValueError: a task or another pipeline of the registry has the name.
    """
    made = Pipeline(name, stages, unique)
    if registry is not None:
        registry.add_pipeline(made.plan(), sys._getframe(1))  # noqa: SLF001 - documented by Python
    return made


def _returns(task: Task[..., Any]) -> Any:
    """Return the annotated type of the handler's result; None if the type is not known."""
    if task.kind is HandlerKind.BATCH:
        return None
    try:
        return typing.get_type_hints(inspect.unwrap(task.handler)).get("return")
    except (NameError, TypeError):  # NameError: a name is imported only for type checkers
        return None


def _policy(word: str) -> OnFailed:
    try:
        return OnFailed(word)
    except ValueError:
        raise InvalidWorkflow(f"on_failed {word!r} is none of {', '.join(OnFailed)}") from None
