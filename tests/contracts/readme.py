"""The tables of README.md, written from the code: `python -m tests.contracts.readme`.

A table stands between `<!-- name -->` and `<!-- /name -->`; all other text is left as it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

from taskd import config, errors
from taskd.cli import EXIT_CODES
from taskd.core.job import TRANSITIONS, JobState
from taskd.store.statements import load
from taskd.web.vocabulary import METRICS

CHECKOUT = Path(__file__).parent.parent.parent
README = CHECKOUT / "README.md"
EVENTS = CHECKOUT / "taskd" / "events.py"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`"


def settings() -> str:
    return table(
        ("Setting", "Default", "Meaning"),
        (
            (
                _code(f"TASKD_{each.name.upper()}"),
                _default(each.name, each.default),
                each.metadata["help"],
            )
            for each in fields(config.Settings)
        ),
    )


def _default(name: str, value: object) -> str:
    if value in (None, ()):
        return ""
    if name.endswith("_s") and isinstance(value, float):
        return _code(f"{value:g}s")
    return _code(str(value))


def events() -> str:
    rows = (
        (_code(name), level, ", ".join(map(_code, told)), meaning)
        for name, level, told, meaning in found_events()
    )
    return table(("Event", "Level", "Fields", "Meaning"), rows)


def metrics() -> str:
    return table(
        ("Metric", "Kind", "Labels", "Meaning"),
        (
            (_code(each.name), each.kind, ", ".join(map(_code, each.all_labels)), each.help)
            for each in METRICS.values()
        ),
    )


def found_events() -> list[tuple[str, str, list[str], str]]:
    """Name, level, fields and meaning of every event, in the order of events.py."""
    tree = ast.parse(EVENTS.read_text(encoding="utf-8"))
    functions = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    job_fields = _keys(next(each for each in functions if each.name == "_job_fields"))
    found: dict[str, tuple[str, str, list[str], str]] = {}
    for function in functions:
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and (event := _event(call)):
                name, level = event
                meaning = (ast.get_docstring(function) or "").splitlines()[0]
                found[name] = (name, level, _fields(call, job_fields), meaning)
    return list(found.values())


def _event(call: ast.Call) -> tuple[str, str] | None:
    """`_emit("job.lost", "warning", ...)` or `_log.info("job.done", ...)`."""
    words = [each.value for each in call.args if isinstance(each, ast.Constant)]
    match call.func:
        case ast.Name("_emit") if len(words) == 2:
            return words[0], words[1]
        case ast.Attribute(ast.Name("_log"), level) if words:
            return words[0], level
    return None


def _fields(call: ast.Call, job_fields: list[str]) -> list[str]:
    told: list[str] = []
    for keyword in call.keywords:
        match keyword.arg, keyword.value:
            case None, ast.Call(ast.Name("_job_fields"), args):
                # The times are told by those who know how long the attempt took.
                told += [each for each in job_fields if len(args) > 1 or not each.endswith("_ms")]
            case None, ast.Name(name):
                told.append(f"{name} ...")
            case str(name), _:
                told.append(name)
    return told


def _keys(function: ast.FunctionDef) -> list[str]:
    """The keys that a function puts into its dictionary."""
    keys: list[str] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            keys += [each.value for each in node.keys if isinstance(each, ast.Constant)]
        match node:
            case ast.Subscript(slice=ast.Constant(value), ctx=ast.Store()):
                keys.append(str(value))
    return keys


def found_errors() -> list[type[errors.TaskdError]]:
    """Every error of errors.py, parents first."""
    return [
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, errors.TaskdError)
    ]


def exit_codes() -> str:
    by_code: dict[int, list[str]] = {code: [] for code in EXIT_CODES}
    for error in found_errors():
        by_code[error.exit_code].append(_code(error.__name__))
    return table(
        ("Code", "Meaning", "Errors"),
        ((str(code), EXIT_CODES[code], ", ".join(names)) for code, names in by_code.items()),
    )


def transitions() -> str:
    by: dict[tuple[str, str], list[str]] = {}
    for statement in load().values():
        for before, after in statement.moves:
            by.setdefault((before, after), []).append(_code(statement.name))
    order = {None: -1} | {state: place for place, state in enumerate(JobState)}
    moves = sorted(TRANSITIONS, key=lambda move: (order[move[0]], order[move[1]]))
    return table(
        ("From", "To", "By"),
        (
            (
                _code(before) if before else "(new)",
                _code(after),
                ", ".join(sorted(by.get((before or "-", after), []))),
            )
            for before, after in moves
        ),
    )


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings,
    "events": events,
    "metrics": metrics,
    "exit codes": exit_codes,
    "transitions": transitions,
}


def written(text: str) -> str:
    """The text with its tables as the code would have them.

    Raises:
        ValueError: a table's markers are missing.
    """
    for name, make in TABLES.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(place.findall(text)) != 1:
            raise ValueError(f"README.md must have <!-- {name} --> and <!-- /{name} --> once")
        block = f"\n{make()}\n\n"
        text = place.sub(lambda found, block=block: found[1] + block + found[2], text)
    return text


if __name__ == "__main__":
    README.write_text(written(README.read_text(encoding="utf-8")), encoding="utf-8")
