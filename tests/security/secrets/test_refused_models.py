"""The error about an argument that a model of Pydantic refuses shows no part of the argument."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from uuid import UUID

import pydantic
import pytest

from taskd.core.tasks.argument_types import from_json_type

SECRET = "s3cr3t value"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Order(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    number: int = 0
    token: UUID | None = None
    by_name: dict[str, int] = {}
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")] | None = None
    word: str = ""

    @pydantic.field_validator("word")
    @classmethod
    def _check(cls, word: str) -> str:
        if word:
            raise ValueError(f"no word is {word}")
        return word


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"number": SECRET}, "number: Input should be a valid integer"),
        ({"token": SECRET}, r"token: the value is refused \(uuid_parsing\)"),
        ({"by_name": {SECRET: "x"}}, r"by_name\.\*: Input should be a valid integer"),
        ({"pet": {"kind": SECRET}}, r"pet: the value is refused \(union_tag_invalid\)"),
        ({"word": SECRET}, r"word: the value is refused \(value_error\)"),
        ({SECRET: 1}, r"\*: Extra inputs are not permitted"),
    ],
)
def test_an_error_about_a_model_shows_the_rule_and_not_the_value(
    value: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        from_json_type(Order, value)
    assert "s3cr3t" not in str(raised.value)
