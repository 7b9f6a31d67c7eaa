"""The tasks: plain functions, as Django's ORM blocks. The worker runs them in threads."""

from django.db import connection, transaction

from shop.models import Order
from taskd import Context, task


@task(queue="orders")
def confirm(ctx: Context, order_id: int) -> None:
    with transaction.atomic():
        Order.objects.filter(pk=order_id).update(confirmed=True)
        ctx.complete_sync(connection)
