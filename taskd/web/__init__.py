"""HTTP: probes, metrics and the dashboard. Needs the extra `web`; nothing here imports it early."""

from __future__ import annotations

from importlib.util import find_spec

from taskd.errors import ConfigError

PACKAGES = ("starlette", "uvicorn", "jinja2", "prometheus_client")


def check_installed(what: str) -> None:
    """See that the extra is there before its modules are imported.

    Args:
        what: what needs it, as its user has said it: `--http`.

    Raises:
        ConfigError: a package is missing; the message gives the pip line.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'pgtaskd[web]'")
