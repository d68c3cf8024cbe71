"""What a script does with its optimizer that other workers could not know, or did not do alike, is named."""

from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop, Iteration, seed
from resile_learner.collectives.exchange import ExchangeRound
from resile_learner.collectives.spec import RoundSpec
from resile_learner.session import SoloSession, enter_session
from resile_learner.training.header import RoundHeader
from resile_learner.training.watch.optimizer_watch import OptimizerWatch
from resile_shared.errors import UsageError

Parts = tuple[nn.Module, torch.optim.Optimizer]


def parts(learning_rate: float = 0.1) -> Parts:
    seed(0)
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=learning_rate)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    update: Callable[[Iteration], object] | None = None,
    **options: Any,
) -> list[int]:
    """Train with ``update`` after each exchange; return the digests of all headers."""
    digests: list[int] = []

    class Recording(SoloSession):
        def begin(self, spec: RoundSpec) -> ExchangeRound:
            round_ = super().begin(spec)
            finish = round_.finish

            def recorded(header: bytes, *, may_leave: bool) -> tuple[bytes, ...]:
                digests.append(RoundHeader.decode(header, lambda _: torch.empty(0))[1].digest)
                return finish(header, may_leave=may_leave)

            round_.finish = recorded  # type: ignore[method-assign]
            return round_

    def run() -> None:
        enter_session(Recording())
        data = TensorDataset(torch.ones(16, 4))
        loop = ElasticLoop(model, optimizer, data, epochs=3, batch_size=16, num_shards=2, **options)
        for iteration in loop:
            for (inputs,) in iteration.shards():
                iteration.backward(model(inputs).square().mean())
            if iteration.exchange():
                (update or (lambda _: optimizer.step()))(iteration)

    Context().run(run)
    return digests


def test_parameters_that_come_later_are_refused() -> None:
    model, optimizer = parts()

    def update(iteration: Iteration) -> None:
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    with pytest.raises(UsageError, match="other parameters after the training call began"):
        train(model, optimizer, update)


def test_parameters_that_are_not_the_models_are_refused() -> None:
    model, _ = parts()
    alone = nn.Parameter(torch.zeros(2))
    with pytest.raises(UsageError, match="not the model's"):
        train(model, torch.optim.SGD([*model.parameters(), alone]))


def test_a_schedule_that_joiners_would_not_receive_is_refused() -> None:
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(UsageError, match="learning-rate schedule is not part of the run's state"):
        train(model, optimizer)
    train(model, optimizer, state={"schedule": schedule})


def test_a_step_that_one_worker_alone_skips_shows_in_its_next_header_even_if_no_parameter_does() -> None:
    def skip_second(iteration: Iteration) -> None:
        if iteration.number != 1:
            optimizer.step()

    scaler = {"scaler": torch.amp.GradScaler("cpu")}  # which may skip a step
    model, optimizer = parts(learning_rate=0.0)
    all_steps = train(model, optimizer, state=scaler)
    model, optimizer = parts(learning_rate=0.0)
    one_less = train(model, optimizer, skip_second, state=scaler)
    assert [mine == other for mine, other in zip(all_steps, one_less, strict=True)][:4] == [True, True, True, False]


@pytest.mark.parametrize(
    ("steps", "complaint"), [(0, "its gradients are lost"), (2, "called 2 times in one iteration")]
)
def test_gradients_are_used_once(steps: int, complaint: str) -> None:
    model, optimizer = parts()

    def update(iteration: Iteration) -> None:
        for _ in range(steps if iteration.number == 1 else 1):
            optimizer.step()

    with pytest.raises(UsageError, match=complaint):
        train(model, optimizer, update)


def test_a_frozen_parameter_that_one_worker_alone_changes_shows_in_its_next_header() -> None:
    def frozen() -> Parts:
        model, _ = parts()
        model.bias.requires_grad_(False)  # type: ignore[operator]
        return model, torch.optim.SGD([model.weight], lr=0.1)  # type: ignore[list-item]

    def change(iteration: Iteration) -> None:
        optimizer.step()
        if iteration.number == 1:
            model.bias.data += 1  # type: ignore[operator]

    expected = train(*frozen())
    model, optimizer = frozen()
    changed = train(model, optimizer, change)
    assert [mine == other for mine, other in zip(expected, changed, strict=True)][:4] == [True, True, True, False]


def test_a_step_in_an_iteration_that_is_repeated_is_refused() -> None:
    model, optimizer = parts()
    watch = OptimizerWatch(model, optimizer, {})
    watch.check_steps(before=0, is_lost=True, may_skip=False)
    optimizer.step()
    with pytest.raises(UsageError, match=r"write `if iteration.exchange\(\): optimizer.step\(\)`"):
        watch.check_steps(before=0, is_lost=True, may_skip=False)
    watch.check_steps(before=0, is_lost=False, may_skip=False)


def test_the_number_of_steps_is_part_of_the_state() -> None:
    watch = OptimizerWatch(*parts(), {})
    watch.load_state_dict({"steps": 7})
    assert watch.state_dict() == {"steps": 7}
