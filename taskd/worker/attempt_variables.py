"""Copy the context variables that the app and its resources have set, for each attempt."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context as ContextVars
from contextvars import copy_context
from decimal import Context as DecimalContext
from decimal import DefaultContext


def copier() -> Callable[[], ContextVars]:
    """Return a function that copies the present context variables for one attempt.

    All attempts share the values of the variables, as the tasks of every asyncio program do. Only
    decimal contexts are copied, because programs change them in place. Otherwise, an attempt that
    sets the precision of decimals would set it for all other attempts.
    """
    base = ContextVars()
    changed = []
    for variable, value in copy_context().items():
        if not isinstance(value, DecimalContext):
            base.run(variable.set, value)
        # A copy takes 1 us, so only decimal contexts that the app has changed are copied. If an
        # attempt has no decimal context, its first calculation with decimals creates the default.
        elif _options(value) != _options(DefaultContext):
            changed.append((variable, value))
    if not changed:
        return base.copy

    def copy() -> ContextVars:
        own = base.copy()
        for variable, value in changed:
            own.run(variable.set, value.copy())
        return own

    return copy


def _options(context: DecimalContext) -> tuple[object, ...]:
    return (
        context.prec, context.rounding, context.Emin, context.Emax, context.capitals,
        context.clamp, context.traps,
    )  # fmt: skip
