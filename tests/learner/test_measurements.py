"""What the lowest rank reports of the times of iterations."""

from dataclasses import replace

from resile_learner.session import View
from resile_learner.training.data.batches import Batch, BatchPlan, Position
from resile_learner.training.measurements import MAX_ITERATIONS, Measurements
from resile_learner.training.stragglers import Pace

VIEW = View(generation=3, workers=(0, 4), me=0, num_hosts=2)
PLAN = BatchPlan(200, 64, 4, seed=0)
WHOLE, SHORT = PLAN.batch(Position()), PLAN.batch(Position(0, 192))
FAST, SLOW = Pace(data=0.1, compute=0.2, callback=0.1), Pace(data=0.1, compute=0.5, callback=0.1)


def begun() -> Measurements:
    """A generation whose first iteration is over."""
    measurements = Measurements()
    measurements.restart()
    measurements.add(WHOLE, [FAST, SLOW], seconds=100.0)
    assert measurements.take(VIEW) is None, "the first iteration of a generation does not count"
    return measurements


def test_an_iteration_takes_the_time_of_its_slowest_worker_and_the_exchange_that_did_not_overlap() -> None:
    measurements = begun()
    for seconds in (1.0, 1.2, 9.0):
        measurements.add(WHOLE, [FAST, SLOW], seconds=seconds)
    found = measurements.take(VIEW)
    assert found is not None
    assert (found.workers, found.hosts, found.batch_size, found.iterations) == (2, 2, 64, 3)
    assert (round(found.compute_seconds, 6), round(found.exchange_seconds, 6)) == (0.7, 0.5), "medians"
    assert measurements.take(VIEW) is None, "each is reported once"


def test_short_batches_and_members_that_measured_nothing_do_not_count() -> None:
    assert len(SHORT.indices) == 8
    measurements = begun()
    measurements.add(SHORT, [FAST, SLOW], seconds=1.0)
    assert measurements.take(VIEW) is None
    measurements.add(WHOLE, [FAST, None], seconds=0.3)
    found = measurements.take(VIEW)
    assert found is not None
    assert found.exchange_seconds == 0.0, "never less than nothing, whatever the clocks say"


def test_iterations_of_different_batches_and_generations_are_not_mixed() -> None:
    measurements = begun()
    measurements.add(WHOLE, [FAST], seconds=1.0)
    measurements.add(_batch(32), [FAST], seconds=0.5)
    found = measurements.take(VIEW)
    assert found is not None
    assert (found.batch_size, found.iterations) == (32, 1)
    measurements.add(_batch(32), [FAST], seconds=0.5)
    measurements.restart()
    assert measurements.take(VIEW) is None


def test_what_is_kept_is_bounded() -> None:
    measurements = begun()
    for _ in range(2 * MAX_ITERATIONS):
        measurements.add(WHOLE, [FAST], seconds=1.0)
    found = measurements.take(VIEW)
    assert found is not None
    assert found.iterations == MAX_ITERATIONS


def _batch(batch_size: int) -> Batch:
    return replace(PLAN, batch_size=batch_size).batch(Position())
