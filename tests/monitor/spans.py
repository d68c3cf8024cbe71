"""Spans as services send them."""

from typing import Any

from resile_shared.messages.spans import Span, Spans

FIRST, SECOND = "1" * 32, "2" * 32


def span(number: int, name: str = "step", *, begin: float, end: float, trace: str = FIRST, **fields: Any) -> Span:
    parent = fields.pop("parent", None)
    return Span(
        trace=trace,
        id=f"{number:016x}",
        parent=None if parent is None else f"{parent:016x}",
        name=name,
        begin=round(begin * 1e6),
        end=round(end * 1e6),
        attributes={f"resile.{key}": value for key, value in {"job": "job-1", **fields}.items()},
    )


def message(*spans: Span) -> Spans:
    return Spans(service="learner", process="1", spans=spans)
