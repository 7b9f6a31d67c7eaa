"""Longer parts of the reference, written from the code: commands, SQL functions, Python names."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, NamedTuple, get_overloads

import click

from taskd import Task
from taskd.cli import COMMANDS, cli
from taskd.client.options import JobOptions
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.limit import Limit
from taskd.core.jobs.unique import Unique
from taskd.core.tasks import task as core
from taskd.store.connections.statements import sql_root
from tests.contracts.markdown import code, table
from tests.contracts.sql_functions import is_called_by

MODULES = (
    "taskd", "taskd.handlers", "taskd.middleware", "taskd.reporting", "taskd.schedules",
    "taskd.workflows", "taskd.testing",
)  # fmt: skip
SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
FUNCTION = re.compile(
    r"((?:^--[^\n]*\n)+)^CREATE FUNCTION (taskd\.\w+)\((.*?)\)\s*(RETURNS .*?)?\n?LANGUAGE",
    re.DOTALL | re.MULTILINE,
)


# What only taskd's own statements give.
INTERNAL = {
    "checked",
    "alone",
    "limit_name",
    "limit_values",
    "in_batch",
    "rule",
    "app",
    "next_at",
}


# The command line.


def commands() -> str:
    """Every command with its help, arguments and options."""
    return "\n\n".join(_group(cli, "taskd", click.Context(cli, info_name="taskd")))


def _group(group: click.Group, path: str, context: click.Context) -> Iterator[str]:
    for name in COMMANDS if group is cli else group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context)
        level = "##" if group is cli else "###"
        yield f"{level} `{path} {name}`\n\n{_help(command.help or '')}"
        if isinstance(command, click.Group):
            yield from _group(command, f"{path} {name}", inner)
        else:
            usage = " ".join(command.collect_usage_pieces(inner))
            yield f"Usage: {code(f'{path} {name} {usage}')}"
            if rows := [_option(each, inner) for each in command.params if _is_shown(each)]:
                yield table(("Option", "Meaning"), rows)


def options_of_all() -> str:
    """The options that stand before the command."""
    context = click.Context(cli, info_name="taskd")
    return table(("Option", "Meaning"), [_option(o, context) for o in cli.params if _is_shown(o)])


def _is_shown(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and not option.hidden and option.name != "help"


def _option(option: click.Parameter, context: click.Context) -> tuple[str, str]:
    record = option.get_help_record(context)
    assert record is not None
    return code(record[0]), record[1]


def _help(text: str) -> str:
    """click's help text as Markdown; what is not to be wrapped becomes a block."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(map(_paragraph, parts))


def _paragraph(text: str) -> str:
    kept = text.startswith("\b")
    lines = [line.rstrip() for line in text.removeprefix("\b").strip("\n").splitlines()]
    if kept:
        return "\n".join(["<!-- not run: from the help -->", "```text", *lines, "```"])
    joined = " ".join(map(str.strip, lines))
    return code(joined) if re.match(r"taskd [a-z]", joined) else joined


# SQL.


def functions() -> str:
    """The public functions: their comments show how to call them."""
    parts = []
    for file in sorted((sql_root() / "migrations").glob("*.sql")):
        for comment, name, parameters, returns in FUNCTION.findall(file.read_text("utf-8")):
            lines = [line for line in comment.splitlines() if not is_called_by(line)]
            said = [line.removeprefix("--").removeprefix(" ") for line in lines]
            calls = [line.strip() for line in said if line.startswith("    ")]
            if not calls:
                continue
            text = "\n".join(line for line in said if not line.startswith("    ")).strip()
            text = re.sub(r"\n{3,}", "\n\n", text)
            rows, outs = _parameters(parameters)
            answer = returns.removeprefix("RETURNS ").strip() or ", ".join(outs)
            parts += [
                f"## `{name}`",
                text,
                "\n".join(["<!-- not run: an example of a comment -->", "```sql", *calls, "```"]),
                f"Returns {code(' '.join(answer.split()))}.",
                table(("Argument", "Type", "Default"), rows),
            ]
    return "\n\n".join(parts)


def _parameters(text: str) -> tuple[list[tuple[str, str, str]], list[str]]:
    """Name, type and default of each parameter; what it gives back by OUT."""
    rows, outs = [], []
    for each in re.split(r",\s*\n?", re.sub(r"--.*", "", text)):
        words = each.strip()
        if words.startswith("OUT "):
            outs.append(words.removeprefix("OUT "))
        elif words:
            said, _, default = words.partition(" DEFAULT ")
            name, _, kind = said.partition(" ")
            if name in INTERNAL:
                continue
            rows.append((code(name), kind, code(default) if default else "must be given"))
    return rows, outs


def columns() -> str:
    """The columns of the view taskd.jobs and their types, with what the tables say of them."""
    text = (sql_root() / "migrations" / "0001_baseline.sql").read_text(encoding="utf-8")
    [view] = re.findall(r"CREATE VIEW taskd\.jobs AS\s+SELECT (.*?)FROM", text, re.DOTALL)
    # A comma in parentheses is part of an expression.
    expressions = re.findall(r"(?:[^,()]|\((?:[^()]|\([^()]*\))*\))+", view)
    shown = [each.split(" AS ")[-1].strip().partition("::")[0] for each in expressions]
    [job] = re.findall(r"CREATE TABLE taskd\.job \((.*?)\n\)", text, re.DOTALL)
    types = dict(re.findall(r"^    (\w+) (double precision|\w+)[ ,]", job, re.MULTILINE))
    for each in expressions:
        cast, _, name = each.strip().partition(" AS ")
        column, _, kind = cast.partition("::")
        if kind or "IS NOT NULL" in cast:
            types[name or column] = kind or "boolean"
    noted: dict[str, str] = {}
    for name in ("job_history", "job"):
        [body] = re.findall(rf"CREATE TABLE taskd\.{name} \((.*?)\n\)", text, re.DOTALL)
        for line in re.sub(r"\n {20,}-- ", " ", body).splitlines():
            found = re.match(r"\s+(\w+) [^-]*-- (.*)", line)
            if found:
                noted[found[1]] = found[2]
    return table(
        ("Column", "Type", "Meaning"),
        [(code(n), types[n], noted.get(n, PLAIN.get(n, ""))) for n in shown],
    )


# What a table's comment leaves to its name.
PLAIN = {
    "id": "the job's id, which never changes",
    "version_at": "the version, if it is a time",
    "attempt": "number of attempts that count, so far",
    "queue": "the queue in which it waits or from which it was claimed",
    "task": "the task's name",
    "state": "one of the seven states",
    "run_at": "when it is due; after a failed attempt, when the retry is due",
    "cancel_requested": "its cancellation was requested while it runs",
    "enqueued_at": "when the transaction that enqueued it began",
    "finished_at": "when it ended",
    "updated_at": "its last known change: its enqueue, claim, last failed attempt, or end",
    "args": "its arguments",
    "result": "what its handler returned",
    "unique_key": "the unique key that it holds or held",
    "key_scope": "for how long it holds the key: `waiting` or `live`",
    "limit_key": "the key (tenant, host) within the limit",
    "workflow_id": "the workflow or run that it belongs to",
    "reason": "why it ended: `expired`, `crashed`, or the reason of a verdict",
}


# Python.

# Types without a docstring of their own.
ALIASES = {
    "taskd.middleware.CallNext": "The type of `call_next`, a function without arguments. "
    "`await call_next()` runs the next middleware, or the handler, and returns the handler's "
    "result or raises its error.",
}


class Doc(NamedTuple):
    """A docstring in its parts."""

    text: str
    sections: dict[str, str]


def read_doc(thing: object) -> Doc:
    """The text of a docstring, and its descriptions of arguments, attributes and errors."""
    text, *rest = SECTION.split(inspect.getdoc(thing) or "")
    bodies = (inspect.cleandoc("\n" + body) for body in rest[1::2])
    return Doc(text.strip(), dict(zip(rest[::2], bodies, strict=True)))


def entries(body: str) -> list[tuple[str, str]]:
    """`name: meaning` of a section; a meaning may go on over indented lines."""
    found = re.findall(r"^(\S[^:\n]*): (.*(?:\n +.*)*)", body, re.MULTILINE)
    return [(name, " ".join(meaning.split())) for name, meaning in found]


def names() -> str:
    """Every public name of every public module."""
    parts: list[str] = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        parts.append(f"## `{module_name}`")
        seen = set(importlib.import_module("taskd").__all__) if module_name != "taskd" else set()
        for name in module.__all__:
            if name not in seen and not _is_error(thing := getattr(module, name)):
                parts += _name(f"{module_name}.{name}", thing)
    return "\n\n".join(parts)


def _is_error(thing: object) -> bool:
    """The errors of errors.py have a table of their own."""
    return inspect.isclass(thing) and thing.__module__ == "taskd.errors"


def _name(path: str, thing: Any) -> Iterator[str]:
    name = path.rpartition(".")[2]
    yield f"### `{path}`"
    if path in ALIASES:
        yield ALIASES[path]
        return
    if not inspect.isclass(thing):
        yield from _callable(name, thing) if callable(thing) else [f"A name for {code(thing)}."]
        return
    if not getattr(thing, "_is_protocol", False) and not issubclass(thing, str):
        yield code(name + _signature(thing))
    yield from _told_by(read_doc(thing), thing)
    if issubclass(thing, str):
        yield ", ".join(code(each) for each in thing)
    members = [(key, each) for base in reversed(thing.__mro__) for key, each in vars(base).items()
               if base.__module__.startswith("taskd")]  # fmt: skip
    rows = [_member(key, each) for key, each in dict(members).items() if not key.startswith("_")]
    if shown := [row for row in rows if row is not None]:
        yield table(("Member", "What it does", "Raises"), shown)


def _member(name: str, thing: Any) -> tuple[str, str, str] | None:
    if isinstance(thing, property):
        return code(name), _one_line(read_doc(thing.fget).text), ""
    if not inspect.isfunction(thing):
        return None
    doc = read_doc((get_overloads(thing) or [thing])[-1] if not thing.__doc__ else thing)
    more = [f"{code(key)}: {meaning}" for key, meaning in entries(doc.sections.get("Args", ""))]
    awaited = "await " if inspect.iscoroutinefunction(thing) else ""
    raised = _one_line(doc.sections.get("Raises", ""))
    said = "<br>".join([_one_line(doc.text), *more])
    return code(f"{awaited}{name}{_signature(thing)}"), said, raised


def _callable(name: str, thing: Callable[..., Any]) -> Iterator[str]:
    yield code(name + _signature(thing))
    yield from _told_by(read_doc(thing), thing)


def _told_by(doc: Doc, thing: Any) -> Iterator[str]:
    yield " ".join(doc.text.split()) if "\n    " not in doc.text else _one_line(doc.text)
    for section in ("Args", "Attributes"):
        if rows := [(code(key), text) for key, text in entries(doc.sections.get(section, ""))]:
            yield table((section.removesuffix("s").replace("Arg", "Argument"), "Meaning"), rows)
    if raised := doc.sections.get("Raises"):
        yield f"Raises {_one_line(raised)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _signature(thing: Any) -> str:
    """What a call takes; of defaults without a short form, three dots."""
    try:
        found = inspect.signature(thing)
    except ValueError:
        return "()"
    kept = [_shown(each) for each in found.parameters.values() if each.name != "self"]
    return str(inspect.Signature(kept))


def _shown(parameter: inspect.Parameter) -> inspect.Parameter:
    empty = inspect.Parameter.empty
    said, default = parameter.annotation, parameter.default
    if default is not empty and (len(repr(default)) > 30 or repr(default).startswith("<")):
        default = default.value if isinstance(default, StrEnum) else Raw("...")
    return parameter.replace(
        annotation=Raw(said) if isinstance(said, str) else said, default=default
    )


class Raw(str):
    """Text that is shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


# Options.


def task_options() -> str:
    return _options(core.Task, "Args", core.Task.__init__, without=frozenset({"handler"}))


def job_options() -> str:
    known = dict(entries(read_doc(NewJob).sections["Attributes"]))
    wanted = JobOptions.__annotations__
    args = dict(entries(read_doc(Task.options).sections["Args"]))
    rows = [(code(name), args.get(name, known.get(name, ""))) for name in args if name in wanted]
    return table(("Option", "Meaning"), rows)


def unique_options() -> str:
    return _options(Unique, "Attributes", Unique)


def limit_options() -> str:
    return _options(Limit, "Attributes", Limit)


def _options(owner: type, section: str, made_by: Any, without: frozenset[str] = frozenset()) -> str:
    parameters = inspect.signature(made_by).parameters
    rows = []
    for name, meaning in entries(read_doc(owner).sections[section]):
        if name not in without:
            default = parameters[name].default
            plain = default in (None, (), "", inspect.Parameter.empty)
            rows.append((code(name), "" if plain else code(_default(default)), meaning))
    return table(("Option", "Default", "Meaning"), rows)


def _default(value: Any) -> str:
    if is_dataclass(value):
        said = ", ".join(f"{each.name}={getattr(value, each.name)!r}" for each in fields(value))
        return f"{type(value).__name__}({said})"
    return str(value)
