"""Faults that the validation library finds are described in plain words."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from resile_shared.validation import describe


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int = 1
    share: float = 1.0
    few: Annotated[int, Field(ge=1)] = 1
    words: Annotated[str, Field(min_length=2)] = "ab"
    kind: Literal["pack", "spread"] = "pack"
    is_last: bool = False
    items: tuple[int, ...] = ()

    @field_validator("share")
    @classmethod
    def _positive(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("nothing is left to share")
        return value


@pytest.mark.parametrize(
    ("fields", "described"),
    [
        ({"number": "x"}, "number must be a valid integer"),
        ({"number": 1.5}, "number must be a valid integer"),
        ({"share": "x"}, "share must be a valid number"),
        ({"share": 0}, "share: nothing is left to share"),
        ({"few": 0}, "few must be greater than or equal to 1"),
        ({"words": "a"}, "words must have at least 2 characters"),
        ({"kind": "near"}, "kind must be 'pack' or 'spread'"),
        ({"is_last": "maybe"}, "is_last must be a valid boolean"),
        ({"items": [1, "x"]}, "items.1 must be a valid integer"),
        ({"other": 1}, "other is unknown"),
        ([], "must be an object"),
    ],
)
def test_a_fault_is_described_in_plain_words(fields: object, described: str) -> None:
    with pytest.raises(ValidationError) as raised:
        Order.model_validate(fields)
    assert describe(raised.value) == described
