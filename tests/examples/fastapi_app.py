"""A shop on FastAPI and SQLAlchemy: an order and the job that confirms it are one transaction.

`uvicorn fastapi_app:app` serves it, `taskd run --app fastapi_app` runs its jobs; both find the
database in DATABASE_URL.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import ForeignKey, update
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import taskd
from taskd import Context, task

engine = create_async_engine(os.environ["DATABASE_URL"])  # postgresql+asyncpg://...
sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase): ...


class Stock(Base):
    __tablename__ = "stock"
    item: Mapped[str] = mapped_column(primary_key=True)
    left: Mapped[int]


class Order(Base):
    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(ForeignKey("stock.item"))
    confirmed: Mapped[bool] = mapped_column(default=False)
    reminders: Mapped[int] = mapped_column(default=0)


@task(queue="orders")
async def confirm(ctx: Context, order_id: int) -> None:
    async with sessions.begin() as session:
        await session.execute(update(Order).where(Order.id == order_id).values(confirmed=True))
        await ctx.complete(session)


@task(queue="reminders")
async def remind(order_id: int) -> None:
    async with sessions.begin() as session:
        again = update(Order).where(Order.id == order_id).values(reminders=Order.reminders + 1)
        await session.execute(again)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    # configure() connects at once, so a wrong DATABASE_URL fails here.
    async with taskd.configure(os.environ["DATABASE_URL"]):
        yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)


class Wish(BaseModel):
    item: str


@app.post("/orders", status_code=201)
async def place(wish: Wish) -> dict[str, int]:
    async with sessions.begin() as session:
        order = Order(item=wish.item)
        session.add(order)
        await session.flush()
        await confirm.on(session).enqueue(order_id=order.id)
        await take_one(session, wish.item)
    return {"order": order.id}


async def take_one(session, item: str) -> None:
    one_less = update(Stock).where(Stock.item == item).values(left=Stock.left - 1)
    if await session.scalar(one_less.returning(Stock.left)) < 0:
        raise HTTPException(409, "sold out")  # and the transaction takes order and job back


@app.post("/orders/{order_id}/reminder", status_code=202)
async def ask_for_reminder(order_id: int) -> dict[str, int]:
    return {"job": await remind.enqueue(order_id=order_id)}  # a transaction of its own
