"""Handlers that fail."""

import logging

from taskd import task

log = logging.getLogger(__name__)


@task(queue="shop", max_attempts=1)
def charge(order: int) -> None:
    log.info("charging order %d", order)
    raise LookupError("the card has expired")


@task(queue="shop", max_attempts=1)
async def ship(order: int) -> None:
    log.info("shipping order %d", order)
    raise LookupError("nobody has packed it")


@task(queue="shop", max_attempts=1, process=True)
def render(order: int) -> None:
    raise ArithmeticError("no such size")
