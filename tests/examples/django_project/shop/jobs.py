"""The tasks: plain functions, as Django's ORM blocks. The worker runs them in threads."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import close_old_connections, connection, transaction

from shop.models import Order
from taskd import Context, task


@contextmanager
def as_in_a_request() -> Iterator[None]:
    close_old_connections()  # Django does so before and after a request; a worker has none
    try:
        yield
    finally:
        close_old_connections()


@task(queue="orders")
@as_in_a_request()
def confirm(ctx: Context, order_id: int) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=order_id).update(confirmed=True)
        ctx.complete_sync(connection)
