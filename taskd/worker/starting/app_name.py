"""The default name of an app: `billing:worker`, from its project and the module of `--app`.

Two services of one database often name their modules alike, so the name of the module is not
enough. The project is the same in every deploy, container and host of an app. Paths differ: a
deploy tool gives each release a directory of its own, and most images use `/app`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from taskd.config.parsing import APP_NAME_CHARS_MAX

# Directories of sources within a project.
SOURCE_DIRECTORIES = frozenset({"src", "lib", "python"})
# Names that many projects give to a directory, and that therefore do not tell projects apart.
COMMON_DIRECTORIES = SOURCE_DIRECTORIES.union(
    ("app", "apps", "backend", "build", "code", "current", "deploy", "deployments", "deploys"),
    ("dist", "home", "local", "main", "opt", "project", "release", "releases", "repo", "root"),
    ("server", "service", "services", "share", "site", "srv", "tmp", "usr", "var", "versions"),
    ("work", "workspace", "www"),
)
# A version at the end of a name, as in billing-1.4.2.
VERSION = re.compile(r"[-_.]v?\d[\w.+-]*$")
# A release: a time, a number, a version or a hash.
RELEASE = re.compile(r"v?[\d._-]+|[0-9a-f]{7,64}", re.IGNORECASE)


def default_name(module: str) -> str:
    """Return the default name of the app in an imported module.

    Returns:
        `project:module`; only the module if nothing names the project.
    """
    root = _root(module)
    project = None if root is None else project_of(root, module.partition(".")[0])
    name = module if project is None else f"{project}:{module}"
    return name if len(name) <= APP_NAME_CHARS_MAX else module[-APP_NAME_CHARS_MAX:]


def project_of(root: Path, package: str) -> str | None:
    """Return the name of the project whose sources are in a directory; None if it is unknown.

    For an installed package, the name is the name of the distribution. For sources elsewhere, it is
    the name in the pyproject.toml. Without a pyproject.toml, it is the name of the nearest
    directory whose name is neither a common name, such as `app`, nor a release.

    Args:
        root: the directory that contains the top-level package or module.
        package: the name of that package or module.
    """
    if {"site-packages", "dist-packages"} & set(root.parts):
        distributions = metadata.packages_distributions().get(package, ())
        return _normalised(min(distributions)) if distributions else None
    project = root.parent if root.name in SOURCE_DIRECTORIES else root
    return _declared(root) or _declared(project) or _directory(project)


def _root(module: str) -> Path | None:
    """Return the directory that contains the top-level package or module, or None."""
    top = sys.modules[module.partition(".")[0]]
    path = next(iter(getattr(top, "__path__", ())), None) or getattr(top, "__file__", None)
    return None if path is None else Path(path).resolve().parent


def _declared(directory: Path) -> str | None:
    """Return the name of the project in a pyproject.toml, as it is in an installed distribution."""
    try:
        content = tomllib.loads((directory / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    tool = content.get("tool")
    poetry = tool.get("poetry") if isinstance(tool, dict) else None
    for table in (content.get("project"), poetry):
        name = table.get("name") if isinstance(table, dict) else None
        if isinstance(name, str) and name.isprintable() and name.strip():
            return _normalised(name)
    return None


def _directory(directory: Path) -> str | None:
    for each in (directory, *directory.parents):
        name = VERSION.sub("", each.name)
        if name and not RELEASE.fullmatch(name) and name.lower() not in COMMON_DIRECTORIES:
            return _normalised(name) if name.isprintable() else None
    return None


def _normalised(name: str) -> str:
    # The Python package index compares names in this form, so an editable and an ordinary install
    # give the same name.
    return re.sub(r"[-_.\s]+", "-", name.strip()).lower()
