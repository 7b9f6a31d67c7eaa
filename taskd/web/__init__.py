"""HTTP: probes, metrics and the dashboard. Needs the extra `web`.

Importing this package does not import the libraries of the extra. Its modules import the worker,
the client, the store, core and events. The command line imports this package.
"""

from __future__ import annotations

from importlib.util import find_spec

from taskd.errors import ConfigError

PACKAGES = ("starlette", "uvicorn", "jinja2", "prometheus_client")


def check_installed(what: str) -> None:
    """Check that the extra is installed, before its modules are imported.

    Args:
        what: the option or command that needs the extra: `--http`.

    Raises:
        ConfigError: a package is missing; the message gives the pip command.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'pgtaskd[web]'")
