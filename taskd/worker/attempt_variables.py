"""The context variables of attempts: copies of those that the app and its resources have set."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context as ContextVars
from contextvars import copy_context
from decimal import Context as DecimalContext
from decimal import DefaultContext


def copier() -> Callable[[], ContextVars]:
    """Return a function that makes the variables of one attempt, as copies of the present ones.

    The values are not copied, as in every asyncio program. Only decimal contexts are, because they
    are changed in place: an attempt that sets its precision would otherwise set that of all others.
    """
    base = ContextVars()
    changed = []
    for variable, value in copy_context().items():
        if not isinstance(value, DecimalContext):
            base.run(variable.set, value)
        # The first calculation with decimals sets the default, and each attempt makes its own of
        # that. Copying it takes 1 us, hence only contexts that the app has changed are copied.
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
