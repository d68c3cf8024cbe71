"""The curves of one job, thinned, as a monitor stores them: what remains of its progress when the reports are gone."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from .message import MAX_SLOTS, Count, Derived, Message, Positive

MAX_POINTS = 500
"""The maximum number of points of a table. Each stands for the same power of two of iterations."""
MAX_CURVES = 32
"""The maximum number of curves of a table; the other numbers that a job reports have none."""
Number = Annotated[float, Field(allow_inf_nan=False)]
Workers = Annotated[int, Field(ge=1, le=MAX_SLOTS)]


class CurveTable(Message):
    """Numbers by iteration: columns of equal length."""

    stride: Positive = Field(default=1, description="of that many iterations there is one point, the newest")
    iterations: tuple[Count, ...] = Field(default=(), max_length=MAX_POINTS)
    times: tuple[Count, ...] = Field(default=(), max_length=MAX_POINTS, description="milliseconds since the epoch")
    workers: tuple[Workers | None, ...] = Field(default=(), max_length=MAX_POINTS)
    values: dict[
        Annotated[str, Field(max_length=100)], Annotated[tuple[Number | None, ...], Field(max_length=MAX_POINTS)]
    ] = Field(default_factory=dict, max_length=MAX_CURVES)

    @model_validator(mode="after")
    def _has_equal_columns(self) -> Self:
        lengths = {len(column) for column in (self.iterations, self.times, self.workers, *self.values.values())}
        if len(lengths) > 1:
            raise ValueError(f"columns must have the same length, not {sorted(lengths)}")
        return self


class Curves(Derived):
    """The curves of one job. A function of the reports up to ``sequence``: all monitors make the same of them."""

    generation: Count = Field(description="of the newest report")
    training: CurveTable = CurveTable()
    validation: CurveTable = Field(default=CurveTable(), description="by the last iteration of the epoch")
