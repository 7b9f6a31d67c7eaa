"""What the documentation has from the code: `python -m tests.contracts.readme` writes it.

Each part stands between `<!-- name -->` and `<!-- /name -->` of its page; all other text is left as
it is. Nothing stands on two pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from taskd import config, errors
from taskd.cli import EXIT_CODES
from taskd.core.jobs.job import TRANSITIONS, JobState
from taskd.store.connections.statements import load
from taskd.web.metrics.vocabulary import METRICS
from tests.contracts import reference, statement_map
from tests.contracts.markdown import code, table

CHECKOUT = Path(__file__).parent.parent.parent
DOCS = CHECKOUT / "taskd" / "docs"
EVENTS = [
    CHECKOUT / "taskd" / "events" / f"{name}.py"
    for name in ("stream", "attempts", "workers", "database")
]


def settings() -> str:
    return table(
        ("Setting", "Default", "Meaning"),
        (
            (
                code(f"TASKD_{each.name.upper()}"),
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
        return code(f"{value:g}s")
    return code(str(value))


def events() -> str:
    rows = (
        (code(name), level, ", ".join(map(code, fields)), meaning)
        for name, level, fields, meaning in found_events()
    )
    return table(("Event", "Level", "Fields", "Meaning"), rows)


def metrics() -> str:
    return table(
        ("Metric", "Kind", "Labels", "Meaning"),
        (
            (code(each.name), each.kind, ", ".join(map(code, each.all_labels)), each.help)
            for each in METRICS.values()
        ),
    )


def found_events() -> list[tuple[str, str, list[str], str]]:
    """Name, level, fields and meaning of every event, in the order of the source."""
    functions = [
        each
        for path in EVENTS
        for each in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(each, ast.FunctionDef)
    ]
    job_fields = _keys(next(each for each in functions if each.name == "job_fields"))
    found: dict[str, tuple[str, str, list[str], str]] = {}
    for function in functions:
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and (event := _event(call)):
                name, level = event
                meaning = (ast.get_docstring(function) or "").splitlines()[0]
                found[name] = (name, level, _fields(call, job_fields), meaning)
    return list(found.values())


def _event(call: ast.Call) -> tuple[str, str] | None:
    """`emit("job.lost", "warning", ...)` or `_log.info("job.done", ...)`."""
    words = [each.value for each in call.args if isinstance(each, ast.Constant)]
    match call.func:
        case ast.Name("emit") if len(words) == 2:
            return words[0], words[1]
        case ast.Attribute(ast.Name("_log"), level) if words:
            return words[0], level
    return None


def _fields(call: ast.Call, job_fields: list[str]) -> list[str]:
    fields: list[str] = []
    for keyword in call.keywords:
        match keyword.arg, keyword.value:
            case None, ast.Call(ast.Name("job_fields"), args):
                # The callers that know how long the attempt took pass the times.
                fields += [each for each in job_fields if len(args) > 1 or not each.endswith("_ms")]
            case None, ast.Name(name):
                fields.append(f"{name} ...")
            case str(name), _:
                fields.append(name)
    return fields


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
        by_code[error.exit_code].append(code(error.__name__))
    return table(
        ("Code", "Meaning", "Errors"),
        ((str(code), EXIT_CODES[code], ", ".join(names)) for code, names in by_code.items()),
    )


def all_errors() -> str:
    rows = (
        (code(each.__name__), (each.__doc__ or "").partition("\n")[0], _parent(each))
        for each in found_errors()
    )
    return table(("Error", "Meaning", "Is a"), rows)


def _parent(error: type[errors.TaskdError]) -> str:
    return code(error.__bases__[0].__name__)


def transitions() -> str:
    by: dict[tuple[str, str], list[str]] = {}
    for statement in load().values():
        for before, after in statement.moves:
            by.setdefault((before, after), []).append(code(statement.name))
    order = {None: -1} | {state: place for place, state in enumerate(JobState)}
    moves = sorted(TRANSITIONS, key=lambda move: (order[move[0]], order[move[1]]))
    return table(
        ("From", "To", "By"),
        (
            (
                code(before) if before else "(new)",
                code(after),
                ", ".join(sorted(by.get((before or "-", after), []))),
            )
            for before, after in moves
        ),
    )


FOLDERS = {"": "Start here", "howto": "How to", "reference": "Reference",
           "explanation": "Explanation", "moving": "Moving to taskd"}  # fmt: skip


def pages() -> str:
    """Every page of the documentation, by folder."""
    parts = []
    for folder, head in FOLDERS.items():
        files = sorted(each for each in (DOCS / folder).glob("*.md") if each.name != "README.md")
        links = (f"- [{_title(each)}]({each.relative_to(DOCS)})" for each in files)
        parts.append(f"**{head}**\n\n" + "\n".join(links))
    return "\n\n".join(parts)


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


# By page: what is written into it.
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"pages": pages},
    "../../sql/README.md": {"statements": statement_map.statements},
    "reference/settings.md": {"settings": settings},
    "reference/events.md": {"events": events},
    "reference/metrics.md": {"metrics": metrics},
    "reference/errors.md": {"exit codes": exit_codes, "errors": all_errors},
    "reference/states.md": {"transitions": transitions, "columns": reference.columns},
    "reference/command-line.md": {
        "options of all": reference.options_of_all,
        "commands": reference.commands,
    },
    "reference/sql.md": {"functions": reference.functions},
    "reference/python.md": {"names": reference.names},
    "reference/options.md": {
        "task options": reference.task_options,
        "job options": reference.job_options,
        "unique options": reference.unique_options,
        "limit options": reference.limit_options,
    },
}


def written(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """The text with its parts as the code would have them.

    Raises:
        ValueError: a part's markers are missing.
    """
    for name, make in parts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(place.findall(text)) != 1:
            raise ValueError(f"the page must have <!-- {name} --> and <!-- /{name} --> once")
        block = f"\n{make()}\n\n"
        text = place.sub(lambda found, block=block: found[1] + block + found[2], text)
    return text


if __name__ == "__main__":
    for page, parts in PARTS.items():
        file = DOCS / page
        file.write_text(written(file.read_text(encoding="utf-8"), parts), encoding="utf-8")
