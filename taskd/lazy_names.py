"""Import the public names of a package at their first use, so that the package imports quickly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    Args:
        package: the `__name__` of the package.
        homes: maps the name of each module within the package to its public names, separated by
            spaces.

    Raises:
        AttributeError: `__getattr__` raises it if the package has no such public name.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    loaded = vars(sys.modules[package])

    def getattr_(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = loaded[name] = getattr(import_module(f"{package}.{home_of[name]}"), name)
        return value

    def dir_() -> list[str]:
        return sorted({*loaded, *home_of})

    return getattr_, dir_
