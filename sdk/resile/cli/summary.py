"""The end of a run in a few lines."""

from collections.abc import Iterator, Mapping

from resile_shared.messages.reports import Completed

from ..local.result import Result
from .pace import clock
from .tables import batches_text, ledger_lines


def summary(result: Result) -> Iterator[str]:
    """Log the results of a completed run, one line each."""
    completed = result.completed
    assert completed is not None
    for label, value in _rows(result, completed):
        yield f"{label:<13}  {value}"


def _rows(result: Result, completed: Completed) -> Iterator[tuple[str, str]]:
    yield "run", f"{result.job}, {clock(result.seconds)}"
    yield "iterations", f"{completed.iteration}"
    yield "epochs", f"{sum(count.num_epochs for count in completed.ledger)}"
    yield "samples seen", f"{completed.samples_seen}"
    if completed.loss is not None:
        yield "loss", f"{completed.loss:.6g}"
    if completed.metrics:
        yield "metrics", _numbers(completed.metrics)
    if completed.validation:
        yield "validation", _numbers(completed.validation)
    yield from (("ledger", line) for line in ledger_lines(completed.ledger))
    if completed.batches:
        yield "batches", batches_text(completed.batches)
    yield "bits", completed.bits
    yield "params sha256", completed.params_sha256
    if result.model:
        yield "model", result.model


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in values.items())
