"""The settings of clients that were given neither a DSN nor settings.

The pytest plugin restricts these settings, so that a test cannot write into a real database by
accident. This module imports no driver, because each pytest run imports the plugin at its start,
and the plugin imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskd.config import Settings

_checks: list[Callable[[Settings], None]] = []


def loaded_settings() -> Settings:
    """Load the settings from files and the environment.

    Raises:
        ConfigError: a setting is not valid, or restrict() does not allow these settings.
    """
    from taskd import config

    settings = config.load().settings
    for check in _checks:
        check(settings)
    return settings


def restrict(check: Callable[[Settings], None]) -> Callable[[], None]:
    """Let loaded_settings() call `check(settings)`, which can raise ConfigError.

    Returns:
        A function that removes the check.
    """
    _checks.append(check)
    return lambda: _checks.remove(check)
