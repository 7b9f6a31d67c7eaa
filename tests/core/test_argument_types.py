"""Arguments that are Pydantic models, and types of arguments that are refused."""

from __future__ import annotations

import datetime as dt
import json
import sys
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import annotated_types
import jsonschema
import msgspec
import numpy as np
import pydantic
import pydantic.dataclasses
import pytest
from pydantic import v1
from sqlalchemy import orm

from taskd.client.enqueueing import check_args
from taskd.core.jobs.job import NewJob
from taskd.core.tasks.context import Context
from taskd.core.tasks.task import Task
from taskd.errors import InvalidArgs, InvalidJob
from taskd.store.jobs.jobs import metadata_text

T = TypeVar("T")


class Line(pydantic.BaseModel):
    sku: str
    qty: int = pydantic.Field(gt=0)


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    id: int = pydantic.Field(alias="orderId")
    at: dt.datetime
    price: Decimal = Decimal("1.50")
    lines: list[Line] = []
    parent: Order | None = None

    @pydantic.computed_field
    def count(self) -> int:
        return len(self.lines)


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Ids(pydantic.RootModel[list[int]]): ...


class Struct(msgspec.Struct):
    order: Order


@dataclass
class Holder:
    order: Order


AT = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
ORDER = Order(orderId=1, at=AT, lines=[Line(sku="a", qty=2)])


def takes(hint: Any, **options: Any) -> Task[..., Any]:
    """A task with one argument `x` of this type."""

    async def handler(x: Any) -> None: ...

    handler.__annotations__["x"] = hint
    return Task(handler, name="takes", **options)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (Order, ORDER),
        (Order, Order(orderId=2, at=AT, parent=ORDER)),
        (list[Order], [ORDER, ORDER]),
        (dict[str, Order], {"a": ORDER}),
        (Order | None, ORDER),
        (Order | None, None),
        (tuple[Order, int], (ORDER, 1)),
        (Page[Line], Page[Line](items=[Line(sku="a", qty=1)])),
        (Ids, Ids([1, 2])),
        (Struct, Struct(ORDER)),
        (Holder, Holder(ORDER)),
        (Annotated[Order, pydantic.Field(description="what to send")], ORDER),
    ],
)
def test_a_model_arrives_as_it_was_sent(hint: Any, value: Any) -> None:
    task = takes(hint)
    text = task.encode(value)
    assert task.decode(text) == {"x": value}
    # What the worker accepts, the published schema accepts.
    check_args("takes", text, task.args_schema)


def test_a_dict_with_the_fields_of_a_model_is_accepted_as_well() -> None:
    given = {"orderId": 1, "at": AT}
    assert takes(Order).decode(takes(Order).encode(given)) == {"x": Order(**given)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"orderId": 1}, "task takes: at: Field required - at `$.x`"),
        ({"orderId": "secret", "at": AT}, "task takes: orderId: Input should be a valid integer"),
        ("secret", "task takes: Input should be an object"),
        (
            {"orderId": 1, "at": AT, "lines": [{"sku": "a", "qty": 0}]},
            "task takes: lines.0.qty: Input should be greater than 0 - at `$.x`",
        ),
        ({f"secret{n}": n for n in range(9)} | {"orderId": 1, "at": AT}, "; and 6 more - at"),
    ],
)
def test_what_does_not_fit_a_model_is_refused_without_its_value(value: Any, message: str) -> None:
    with pytest.raises(InvalidArgs) as raised:
        takes(Order).encode(value)
    assert message in str(raised.value)
    assert '"secret"' not in str(raised.value)
    assert "pydantic.dev" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_an_error_of_any_class_in_a_validator_refuses_the_arguments() -> None:
    class Odd(pydantic.BaseModel):
        a: int

        @pydantic.field_validator("a")
        @classmethod
        def _divide(cls, value: int) -> int:
            return 1 // value

    with pytest.raises(InvalidArgs, match="its validation raised ZeroDivisionError"):
        takes(Odd).encode({"a": 0})


@pytest.mark.parametrize(
    "args",
    [
        '{"x": {"orderId": "1", "at": "2026-01-02T00:00:00Z"}}',
        '{"x": {"orderId": 1, "at": "tomorrow"}}',
        '{"x": {"orderId": 1, "at": "2026-01-02T00:00:00Z", "lines": [{"sku": "a", "qty": 0}]}}',
        '{"x": {"orderId": 1, "at": "2026-01-02T00:00:00Z", "more": 1}}',
        '{"x": {"orderId": 1, "at": "2026-01-02T00:00:00Z", "parent": {"orderId": 1}}}',
        '{"x": null}',
    ],
)
def test_the_published_schema_refuses_what_the_model_refuses(args: str) -> None:
    task = takes(Order)
    with pytest.raises(InvalidArgs):
        check_args("takes", args, task.args_schema)
    with pytest.raises(InvalidArgs):
        task.decode(args)


def test_types_of_one_name_have_schemas_of_their_own() -> None:
    class Order(pydantic.BaseModel):
        other: int

    class Line(msgspec.Struct):
        length: float

    async def handler(a: Any, b: Any, c: Any) -> None: ...

    handler.__annotations__ |= {"a": Order, "b": globals()["Order"], "c": Line}
    task = Task(handler)
    schema = json.loads(task.args_schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    text = task.encode(a=Order(other=1), b=ORDER, c=Line(2.5))
    check_args("handler", text, task.args_schema)
    with pytest.raises(InvalidArgs):
        check_args("handler", text.replace('"other":1', '"other":"x"'), task.args_schema)
    with pytest.raises(InvalidArgs):
        check_args("handler", text.replace('"qty":2', '"qty":-2'), task.args_schema)


def test_a_model_for_an_untyped_argument_arrives_as_a_dict() -> None:
    assert takes(Any).decode(takes(Any).encode(Line(sku="a", qty=1))) == {
        "x": {"sku": "a", "qty": 1}
    }


def test_pydantic_is_not_imported() -> None:
    code = "import taskd, sys; taskd.task; assert 'pydantic' not in sys.modules"
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True)


class Row(orm.DeclarativeBase): ...


class User(Row):
    __tablename__ = "users"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)


class Account:
    """As a model of Django."""

    _meta = None


class Table:
    """As a data frame of pandas."""

    def to_dict(self) -> None: ...


class Secret(pydantic.BaseModel):
    password: pydantic.SecretStr


class Later(pydantic.BaseModel):
    of: NotDefined  # type: ignore[name-defined]  # noqa: F821


class Old(v1.BaseModel):
    a: int


@pydantic.dataclasses.dataclass
class Checked:
    a: pydantic.PositiveInt


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (Path, "Path has no JSON form: use str, with the text of the path"),
        (Path | None, "Path has no JSON form: use str"),
        (User, "User has no JSON form: use the id of the row"),
        (list[User], "User has no JSON form: use the id of the row"),
        (list[Context], "a context cannot be part of an argument"),
        (np.int64, "int64 has no JSON form: use int, float"),
        (np.ndarray, "ndarray has no JSON form: use a list of numbers (.tolist())"),
        (object, "object has no JSON form: use JSON's types"),
        (pydantic.HttpUrl, "HttpUrl has no JSON form: use a Pydantic model with a field"),
        (Old, "Old has no JSON form: use a model of Pydantic 2"),
        (Secret, "the model Secret has a secret field"),
        (Later, "the model Later has no JSON Schema: `Later` is not fully defined"),
        (Order | Line, "a union of a model and other types cannot be told apart"),
        (Order | int | None, "a union of a model and other types cannot be told apart"),
        (pydantic.PositiveInt, "only models of Pydantic apply Gt: use it in a pydantic.BaseModel"),
        (list[Annotated[int, pydantic.Field(gt=0)]], "only models of Pydantic apply FieldInfo"),
        (Annotated[int, annotated_types.Le(5)], "only models of Pydantic apply Le"),
        (Checked, "only models of Pydantic apply Checked"),
    ],
)
def test_an_unsupported_type_is_refused_with_its_argument_and_a_remedy(
    hint: Any, message: str
) -> None:
    with pytest.raises(TypeError) as raised:
        takes(hint)
    assert str(raised.value).startswith(f"task takes: the argument 'x': {message}")
    assert (
        "msgspec" not in str(raised.value)
        or "msgspec.Meta" in str(raised.value)
        or ("msgspec.Struct" in str(raised.value))
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Path("/tmp"), "PosixPath has no JSON form: use str"),
        (User(id=1), "User has no JSON form: use the id of the row"),
        (np.array([1]), "ndarray has no JSON form: use a list of numbers"),
        (Account(), "Account has no JSON form: use the id of the row"),
        (Table(), "Table has no JSON form: use a list of numbers (.tolist()), or store the data"),
        (float("nan"), "NaN and infinities have no JSON form"),
        (np.float64("inf"), "NaN and infinities have no JSON form"),
    ],
)
def test_an_untyped_value_without_a_json_form_is_refused_with_a_remedy(
    value: Any, message: str
) -> None:
    with pytest.raises(InvalidArgs) as raised:
        takes(Any).encode(value)
    assert str(raised.value).startswith(f"task takes: {message}")


def test_numbers_of_numpy_are_accepted_as_numbers() -> None:
    assert takes(int).encode(np.int64(3)) == '{"x":3}'
    assert takes(list[float]).encode([np.float32(0.5)]) == '{"x":[0.5]}'
    assert takes(bool).encode(np.bool_(True)) == '{"x":true}'


def test_an_upgrade_may_return_models_and_refuses_nan() -> None:
    def make(args: dict[str, Any]) -> dict[str, Any]:
        return {"x": Line(sku="a", qty=np.int64(args["qty"]))}

    task = takes(Line, args_version=2, upgrade={1: make})
    assert task.decode('{"qty": 2}', 1) == {"x": Line(sku="a", qty=2)}
    task = takes(float | None, args_version=2, upgrade={1: lambda _: {"x": float("nan")}})
    with pytest.raises(InvalidArgs, match="NaN and infinities have no JSON form"):
        task.decode("{}", 1)


def test_metadata_may_contain_numbers_of_numpy_and_no_nan() -> None:
    assert metadata_text(NewJob("work", metadata={"n": np.int64(3)})) == '{"n":3}'
    for value, message in ((float("nan"), "NaN and inf"), (np.array([1]), "ndarray has no JSON")):
        with pytest.raises(InvalidJob, match=f"metadata: {message}"):
            NewJob("work", metadata={"n": value})
