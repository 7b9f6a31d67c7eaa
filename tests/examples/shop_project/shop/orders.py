"""The app's own code, which enqueues as it does in production."""

from shop.jobs import charge


async def place(order: int, cents: int) -> None:
    await charge.enqueue(order=order, cents=cents)
