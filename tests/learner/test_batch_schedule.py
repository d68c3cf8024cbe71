"""A global batch that changes at an iteration boundary: what one worker does about it."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop, ElasticModel, Result, seed
from resile_learner.messages import Completed, Message, Progress
from resile_learner.session import SoloSession, View, enter_session
from resile_learner.training.batch_schedule import BatchSchedule, declared_range
from resile_learner.training.data.batches import START, BatchPlan
from resile_learner.training.learning_rate import LearningRateRule
from resile_shared.errors import UsageError
from resile_shared.messages.reports import MAX_BATCH_STEPS, BatchRange, BatchStep

RANGE = BatchRange(least=16, most=128)
SAMPLES = 500


def steps(*pairs: tuple[int, int]) -> tuple[BatchStep, ...]:
    return tuple(BatchStep(iteration=iteration, batch_size=size) for iteration, size in pairs)


# the schedule


def test_only_committed_iterations_change_the_schedule() -> None:
    schedule = BatchSchedule(32, RANGE)
    assert schedule.next(7, ordered=64) == 64
    assert schedule.next(7, ordered=None) == 32, "that generation committed nothing: its batch was never used"
    schedule.commit(7, 64)
    assert schedule.next(8, ordered=None) == 64, "a generation without a batch of its own keeps it"
    schedule.commit(8, 64)
    assert schedule.steps == steps((0, 32), (7, 64))


def test_the_first_iteration_may_have_another_batch_than_the_training_call() -> None:
    schedule = BatchSchedule(32, RANGE)
    schedule.commit(0, 64)
    assert schedule.steps == steps((0, 64))


def test_an_order_cannot_leave_the_range_that_was_declared() -> None:
    assert BatchSchedule(32, RANGE).next(0, ordered=1) == 16
    assert BatchSchedule(32, RANGE).next(0, ordered=1000) == 128
    assert BatchSchedule(32).next(0, ordered=64) == 32, "and a job without a range has one batch"


def test_a_batch_that_changed_too_often_stays() -> None:
    schedule = BatchSchedule(32, RANGE)
    for iteration in range(2 * MAX_BATCH_STEPS):
        schedule.commit(iteration, schedule.next(iteration, ordered=16 if iteration % 2 else 64))
    assert len(schedule.steps) == MAX_BATCH_STEPS


@given(
    st.dictionaries(st.integers(1, 60), st.integers(1, 64), max_size=8),
    st.integers(1, 64),
    st.integers(1, 3),
    st.integers(1, 300),
)
def test_a_replay_has_the_batches_of_the_run_and_knows_how_many_iterations_come(
    changes: dict[int, int], first: int, epochs: int, num_samples: int
) -> None:
    everything = BatchRange(least=1, most=64)
    replayed = steps((0, first), *sorted(changes.items()))
    schedule = BatchSchedule(1, everything, replayed=replayed)
    plan = BatchPlan(num_samples, 1, 1, seed=0)
    position, iteration, totals = START, 0, set()
    while position.epoch < epochs:
        plan = replace(plan, batch_size=schedule.next(iteration, ordered=7))
        totals.add(schedule.iterations_total(iteration, plan, position, epochs=epochs))
        schedule.commit(iteration, plan.batch_size)
        position = plan.batch(position).next
        iteration += 1
    assert totals == {iteration}
    again = BatchSchedule(1, everything, replayed=schedule.steps)
    assert [again.next(i, ordered=None) for i in range(iteration)] == [
        schedule.next(i, ordered=None) for i in range(iteration)
    ]


# training


class Ordered(SoloSession):
    """A run of one worker whose orders have the batches of ``orders``, by iteration."""

    def __init__(self, orders: dict[int, int | None], *, replayed: tuple[BatchStep, ...] = ()) -> None:
        super().__init__()
        self.batches = replayed
        self.messages: list[Message] = []
        self._orders = orders
        self._ordered: int | None = None

    @property
    def view(self) -> View:  # type: ignore[override]
        return View(generation=1, workers=(0,), me=0, batch_size=self._ordered)

    def begin_iteration(self, iteration: int) -> None:
        self._ordered = self._orders.get(iteration, self._ordered)

    def report(self, message: Message) -> None:
        self.messages.append(message)


class Seen:
    """What one run used."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []
        """During the steps of the optimizer."""
        self.shown: list[float] = []
        """Between them."""
        self.totals: list[int] = []


def run(
    session: Ordered,
    *,
    rule: LearningRateRule = "linear",
    batch_range: tuple[int, int] | None = (16, 128),
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    num_workers: int = 0,
    epochs: int = 2,
    stop_at: int | None = None,
) -> tuple[Result, Seen]:
    seen = Seen()

    def train() -> Result:
        enter_session(session)
        seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        lr_scheduler = schedule(optimizer) if schedule else None
        inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
        loop = ElasticLoop(
            model,
            optimizer,
            TensorDataset(inputs, (inputs.sum(1) > 0).long()),
            epochs=epochs,
            batch_size=32,
            batch_range=batch_range,
            learning_rate_rule=rule,
            num_workers=num_workers,
            state={"schedule": lr_scheduler} if lr_scheduler else None,
        )
        optimizer.register_step_pre_hook(lambda *_: seen.rates.append(optimizer.param_groups[0]["lr"]))
        for iteration in _announced(loop, session):
            seen.sizes.append(iteration.num_samples)
            seen.shown.append(optimizer.param_groups[0]["lr"])
            seen.totals.append(loop.iterations_total)
            if iteration.number == stop_at:
                loop.stop()
            for x, y in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(x), y))
            if iteration.exchange():
                optimizer.step()
                if lr_scheduler:
                    lr_scheduler.step()
        assert loop.result is not None
        assert not multiprocessing.active_children(), "whatever still refers to the loop"
        return loop.result

    result = Context().run(train)
    return result, seen


def _announced(loop: ElasticLoop, session: Ordered) -> Iterator[Any]:
    session.begin_iteration(0)
    for iteration in loop:
        yield iteration
        session.begin_iteration(iteration.number + 1)


ORDERS: dict[int, int | None] = {3: 128, 6: None, 8: 16, 12: 64}
STEPS = steps((0, 32), (3, 128), (8, 16), (12, 64))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_batch_changes_exactly_where_the_order_says_and_every_sample_is_used_once(num_workers: int) -> None:
    session = Ordered(ORDERS)
    result, seen = run(session, num_workers=num_workers)
    assert seen.sizes[:5] == [32, 32, 32, 128, 128]
    assert sum(seen.sizes) == result.samples_seen == 2 * SAMPLES
    assert result.iterations == len(seen.sizes) == seen.totals[-1]
    assert result.batches == STEPS
    completed = next(message for message in session.messages if isinstance(message, Completed))
    assert completed.batches == STEPS
    assert [(count.epoch, count.once, count.samples) for count in completed.ledger] == [
        (0, SAMPLES, SAMPLES),
        (1, SAMPLES, SAMPLES),
    ]
    estimates = [message.iterations_total for message in session.messages if isinstance(message, Progress)]
    assert estimates[-1] == result.iterations


def test_a_replay_of_the_batches_gives_the_same_bits_and_another_schedule_other_bits() -> None:
    result, seen = run(Ordered(ORDERS))
    replay, again = run(Ordered({}, replayed=result.batches))
    assert replay.params_sha256 == result.params_sha256
    assert again.sizes == seen.sizes
    assert again.totals == [result.iterations] * result.iterations, "it knows its end from the start"
    other, _ = run(Ordered({}, replayed=steps((0, 32), (4, 128))))
    assert other.params_sha256 != result.params_sha256


def test_a_job_without_a_range_does_not_change_and_says_nothing_of_it() -> None:
    session = Ordered(ORDERS)
    result, seen = run(session, batch_range=None)
    fixed, _ = run(Ordered({}), batch_range=None)
    assert result.params_sha256 == fixed.params_sha256
    assert set(seen.sizes[:-1]) <= {32, SAMPLES % 32}
    completed = next(message for message in session.messages if isinstance(message, Completed))
    assert completed.batches == ()
    assert {message.iterations_total for message in session.messages if isinstance(message, Progress)} == {None}


def test_a_script_that_stops_is_not_resumed_by_another_batch() -> None:
    result, _ = run(Ordered({5: 128, 6: 16}), stop_at=5)
    assert result.iterations == 6


def test_a_batch_that_gets_smaller_in_what_would_have_been_the_last_iteration_leaves_no_sample_out() -> None:
    result, seen = run(Ordered({0: 128, 3: 16}), epochs=1)
    assert seen.sizes[:4] == [128, 128, 128, 16], "with 128 the fourth would have been the last"
    assert result.samples_seen == SAMPLES


# learning rates


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_learning_rates_follow_the_batch_by_the_rule(rule: LearningRateRule, factor: float) -> None:
    _, seen = run(Ordered({3: 128}), rule=rule)
    assert seen.rates[:3] == [0.1] * 3
    assert seen.rates[3:6] == pytest.approx([0.1 * factor] * 3)
    assert set(seen.shown) == {0.1}, "between steps the script sees its own"


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: ExponentialLR(optimizer, 0.9),
        lambda optimizer: CosineAnnealingLR(optimizer, 50),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ],
)
def test_schedules_go_on_as_if_rates_were_not_scaled(schedule: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Some compute a rate from the one before, some from the first: neither notices the batch."""
    _, fixed = run(Ordered({}), schedule=schedule)
    _, changed = run(Ordered({3: 128, 5: 32}), schedule=schedule)
    assert changed.shown[:8] == fixed.shown[:8]
    factors = [rate / shown for rate, shown in zip(changed.rates[:8], changed.shown[:8], strict=True)]
    assert factors == pytest.approx([1, 1, 1, 4, 4, 1, 1, 1])


def test_a_step_that_raises_does_not_scale_the_next_one_twice() -> None:
    session = Ordered({0: 64})
    rates: list[float] = []

    def train() -> None:
        enter_session(session)
        session.begin_iteration(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ElasticLoop(
            model, optimizer, TensorDataset(torch.ones(64, 4)), batch_size=32, batch_range=(32, 64), num_shards=1
        )
        for iteration in loop:
            for (x,) in iteration.shards():
                iteration.backward(model(x).mean())
            if iteration.exchange():
                failing = optimizer.register_step_pre_hook(_raise)
                with pytest.raises(ValueError, match="once"):
                    optimizer.step()
                failing.remove()
                optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
                optimizer.step()

    Context().run(train)
    assert rates == [0.2]


def _raise(*arguments: object) -> None:
    raise ValueError("once")


# what cannot work


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_range": (64, 32)}, "the range is \\(least, most\\)"),
        ({"batch_range": (64, 128)}, "batch_size, with which training starts, lies in it"),
        ({"batch_range": (32, 10**13)}, "its most is 1000000000000 or less"),
        ({"batch_range": (2, 128), "num_shards": 129}, "num_shards is 129 for a batch of 128: use 1 to 128"),
        ({"batch_range": (32, 128), "learning_rate_rule": "cubic"}, "learning_rate_rule is 'cubic'"),
    ],
)
def test_a_range_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    model = nn.Linear(4, 1)
    elastic = ElasticModel(
        model,
        lambda: (TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), None),
        nn.MSELoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    with pytest.raises(UsageError, match=message):
        Context().run(lambda: elastic.train(batch_size=32, **settings))


def test_a_range_that_could_leave_nothing_to_train_on_is_refused_at_once() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(SAMPLES, 4))

    def call() -> None:
        ElasticLoop(model, optimizer, data, batch_size=32, batch_range=(32, 512), drop_last=True)

    with pytest.raises(UsageError, match="500 samples do not fill a batch of 512"):
        Context().run(call)


@pytest.mark.parametrize(
    ("batch_range", "options", "message"),
    [
        ((100, 256), {}, "batch_size 64: the range is"),
        ((100, 256), {"batch_sampler": [[0, 1], [2, 3]]}, "beside a batch sampler, which decides the batches: leave"),
    ],
)
def test_a_range_is_compared_with_the_batch_unless_there_can_be_none(
    batch_range: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(SAMPLES, 4))
    with pytest.raises(UsageError, match=message):
        Context().run(lambda: ElasticLoop(model, optimizer, data, batch_range=batch_range, **options))


def test_a_replay_that_the_training_call_does_not_allow_is_refused() -> None:
    with pytest.raises(UsageError, match="no batch_range"):
        run(Ordered({}, replayed=steps((0, 32), (3, 64))), batch_range=None)
    with pytest.raises(UsageError, match="batch_range is 16 to 128"):
        run(Ordered({}, replayed=steps((0, 32), (3, 256))))
    run(Ordered({}, replayed=steps((0, 32))), batch_range=None)


def test_workers_of_a_batch_with_fewer_samples_than_shards_take_two_samples_each() -> None:
    assert declared_range((8, 64), num_shards=8) == BatchRange(least=8, most=64)
    assert declared_range((8, 64), num_shards=16) == BatchRange(least=8, most=64, least_per_slot=2)
    assert declared_range((1, 64), num_shards=16) == BatchRange(least=1, most=64, least_per_slot=1)
