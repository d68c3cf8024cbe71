"""Curves are bounded, hold reports as they were, and are the same whoever makes them, as often as reports are read."""

from collections.abc import Iterable

import hypothesis.strategies as st
from hypothesis import given, settings

from resile_monitor.history.curves import JobCurves, speeds
from resile_shared.messages.curves import MAX_CURVES, MAX_POINTS, CurveTable
from resile_shared.messages.reports import Progress

Told = tuple[int, Progress]


def progress(iteration: int, loss: float = 0.5, *, ends_epoch: bool = False) -> Progress:
    scores = {"accuracy": iteration / 100} if ends_epoch else {}
    return Progress(
        iteration=iteration, epoch=0, loss=loss, metrics={"norm": 1.0}, validation=scores, ends_epoch=ends_epoch
    )


def curves_of(told: Iterable[Told], curves: JobCurves | None = None) -> JobCurves:
    curves = curves or JobCurves()
    for generation, report in told:
        curves.add(report, generation=generation, time=1000 * report.iteration, workers=generation)
    return curves


def test_each_point_is_a_report_as_it_was_and_the_newest_is_there() -> None:
    curves = curves_of((1, progress(n, 1 / n)) for n in range(1, 20_001))
    table = curves.message(sequence=7).training
    assert MAX_POINTS / 2 <= len(table.iterations) <= MAX_POINTS
    assert table.iterations[-1] == 20_000
    losses = table.values["loss"]
    assert all(loss == float(f"{1 / n:.7g}") for n, loss in zip(table.iterations, losses, strict=True))
    assert max(after - before for before, after in zip(table.iterations, table.iterations[1:], strict=False)) <= (
        2 * table.stride
    )


def test_validation_is_kept_apart_from_the_reports_that_repeat_it() -> None:
    curves = curves_of([(1, progress(5)), (1, progress(10, ends_epoch=True)), (1, progress(11))])
    message = curves.message(sequence=1)
    assert message.validation.iterations == (10,)
    assert message.validation.values == {"accuracy": (0.1,)}
    assert message.training.iterations == (5, 10, 11)


def test_the_scores_of_an_iteration_that_was_reported_before_its_validation_are_kept() -> None:
    told = [(1, progress(9)), (1, progress(10)), (1, progress(10, 0.1, ends_epoch=True)), (1, progress(11))]
    for curves in (curves_of(told), curves_of(told[1:], JobCurves.of(curves_of(told[:2]).message(sequence=1)))):
        message = curves.message(sequence=1)
        assert message.validation.iterations == (10,)
        assert message.training.iterations == (9, 10, 11)
        assert message.training.values["loss"] == (0.5, 0.5, 0.5), "a point is the first report of its iteration"
    assert not curves_of(told[:3]).add(told[1][1], generation=1, time=0, workers=1), "it is read again"


def test_a_job_that_resumes_from_a_checkpoint_draws_over_what_it_lost() -> None:
    curves = curves_of([(1, progress(10)), (1, progress(20)), (1, progress(30)), (2, progress(15, 0.25))])
    table = curves.message(sequence=1).training
    assert table.iterations == (10, 15)
    assert table.values["loss"] == (0.5, 0.25)
    assert table.workers == (1, 2)
    scored = curves_of([(1, progress(10, ends_epoch=True)), (1, progress(20, ends_epoch=True)), (2, progress(15))])
    assert scored.message(sequence=1).validation.iterations == (10,)


def test_late_reports_change_nothing() -> None:
    curves = curves_of([(2, progress(10)), (1, progress(40)), (2, progress(9)), (2, progress(10, 0.1))])
    assert curves.message(sequence=1).training.values["loss"] == (0.5,)


def test_what_json_has_no_form_for_is_left_out() -> None:
    curves = curves_of([(1, progress(1, float("nan"))), (1, progress(2, float("inf"))), (1, progress(3))])
    message = curves.message(sequence=1)
    assert message.training.values["loss"] == (None, None, 0.5)
    assert type(message).model_validate_json(message.model_dump_json()) == message


def test_a_job_with_too_many_metrics_has_curves_of_the_first() -> None:
    many = Progress(iteration=1, epoch=0, loss=1.0, metrics={f"metric {n}": 1.0 for n in range(100)})
    table = curves_of([(1, many)]).message(sequence=1).training
    assert len(table.values) == MAX_CURVES
    assert "loss" in table.values


numbers = st.integers(0, 3000) | st.integers(0, 5)
reports = st.tuples(st.integers(1, 3), st.builds(progress, numbers, ends_epoch=st.booleans()))


@settings(max_examples=40)
@given(told=st.lists(reports, max_size=60), steps=st.integers(2, 3), data=st.data())
def test_a_monitor_that_starts_anywhere_makes_the_same(told: list[Told], steps: int, data: st.DataObject) -> None:
    """What is stored, and the reports after it, some of them again: as if there had been one monitor all the time."""
    told = [*told, *((3, progress(n)) for n in range(0, 2500, steps))]
    stored_at = data.draw(st.integers(0, len(told)))
    again_from = data.draw(st.integers(0, stored_at))
    stored = curves_of(told[:stored_at]).message(sequence=stored_at)
    restarted = curves_of(told[again_from:], JobCurves.of(stored))
    assert restarted.message(sequence=0) == curves_of(told).message(sequence=0)


def test_speed_is_between_points() -> None:
    table = CurveTable(iterations=(0, 10, 30, 40), times=(0, 1000, 2000, 2000), workers=(1, 1, 2, 2))
    assert speeds(table) == (None, 10.0, 20.0, None)
    assert speeds(CurveTable()) == ()
