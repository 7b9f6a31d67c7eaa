"""Which function of taskd/store runs each statement, and which files call that function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import taskd
from taskd.store.connections.statements import load
from tests.contracts.markdown import code, table

PACKAGE = Path(taskd.__file__).parent
STORE = "taskd.store."


@cache
def trees() -> dict[Path, list[ast.AST]]:
    """The nodes of every file of the package."""
    return {
        path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def dotted(path: Path) -> str:
    """The module's name within the package: `store.jobs.jobs`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def constants(node: ast.AST) -> set[object]:
    return {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}


def run_by_the_store() -> dict[str, set[str]]:
    """`jobs.jobs.claim` for each statement that a function of the store names."""
    found: dict[str, set[str]] = {}
    for path, nodes in trees().items():
        module = dotted(path)
        if not module.startswith("store."):
            continue
        for node in nodes:
            if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef):
                for name in load().keys() & constants(node):
                    function = f"{module.removeprefix('store.')}.{node.name}"
                    found.setdefault(name, set()).add(function)
    return found


def callers() -> dict[str, set[str]]:
    """The files that name a function of the store, by `jobs.jobs.claim`."""
    found: dict[str, set[str]] = {}
    for path, nodes in trees().items():
        file = str(path.relative_to(PACKAGE))
        modules: dict[str, str] = {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(STORE):
                base = f"{node.module}.".removeprefix(STORE)
                for each in node.names:
                    modules[each.asname or each.name] = f"{base}{each.name}"
                    found.setdefault(f"{base}{each.name}", set()).add(file)
        for node in nodes:
            match node:
                case ast.Attribute(ast.Name(module), function) if module in modules:
                    found.setdefault(f"{modules[module]}.{function}", set()).add(file)
    return found


def rows() -> Iterator[tuple[str, str, set[str], set[str]]]:
    """File, statement, functions of the store and callers, in the order of the files."""
    run_by, called = run_by_the_store(), callers()
    for each in load().values():
        functions = run_by.get(each.name, set())
        files = set().union(*(called.get(function, set()) for function in functions))
        if not functions:
            files = {
                str(path.relative_to(PACKAGE))
                for path, nodes in trees().items()
                if any(isinstance(n, ast.Constant) and n.value == each.name for n in nodes)
            }
        yield each.file, each.name, functions, files


def statements() -> str:
    """The table of sql/README.md: statements with the same function and callers share a row."""
    lines = []
    for (file, functions, files), group in groupby(
        rows(), lambda row: (row[0], sorted(row[2]), sorted(row[3]))
    ):
        lines.append(
            (
                code(file.removesuffix(".sql")),
                ", ".join(code(name) for _, name, _, _ in group),
                ", ".join(map(code, functions)) or "the handler's connection",
                ", ".join(map(code, files)),
            )
        )
    return table(("File", "Statement", "Store function", "Called by"), lines)
