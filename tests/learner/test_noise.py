"""The gradient noise scale: known where the problem says what it is."""

from contextvars import Context
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop, seed
from resile_learner.messages import Message, Progress
from resile_learner.session import SoloSession, enter_session
from resile_learner.training.noise import NoiseScale, SquaredNorms

DIMENSIONS, SAMPLES = 40, 4096


class Heard(SoloSession):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def report(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def noise_scale(self) -> float | None:
        return [message for message in self.messages if isinstance(message, Progress)][-1].noise_scale


def test_the_estimates_are_those_of_the_formulas() -> None:
    """With these norms tr(S) is 8 * (10 - 4) / 3 = 16, and |G|^2 is (4 * 4 - 10) / 3 = 2."""
    noise = NoiseScale()
    assert noise.value is None
    noise.add(SquaredNorms(of_shards=10.0, of_batch=4.0), num_samples=8, num_shards=4)
    assert noise.value == pytest.approx(8.0), "after one iteration already"


def test_what_cannot_be_known_is_not_said() -> None:
    noise = NoiseScale()
    noise.add(SquaredNorms(10.0, 4.0), num_samples=8, num_shards=1)
    noise.add(SquaredNorms(float("inf"), float("nan")), num_samples=8, num_shards=4)
    assert noise.value is None
    noise.add(SquaredNorms(10.0, 1.0), num_samples=8, num_shards=4)
    assert noise.value is None, "all noise: the mean gradient is not seen"


def test_the_averages_are_part_of_the_state() -> None:
    one, other = NoiseScale(), NoiseScale()
    one.add(SquaredNorms(10.0, 4.0), num_samples=8, num_shards=4)
    other.load_state_dict(one.state_dict())
    assert other.value == one.value


def measured(
    *,
    mean: float,
    batch_size: int = 64,
    num_shards: int = 8,
    scale: float = 1.0,
    has_range: bool = True,
    **options: Any,
) -> float | None:
    """Of a linear loss, whose gradient for a sample is the sample: normal, of variance 1 around ``mean``."""
    session = Heard()

    def train() -> None:
        enter_session(session)
        seed(0)
        generator = torch.Generator().manual_seed(0)
        samples = mean + torch.randn(SAMPLES, DIMENSIONS, generator=generator)
        model = nn.ModuleList([nn.Linear(DIMENSIONS // 2, 1, bias=False) for _ in range(2)])
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if scale != 1.0 else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loop = ElasticLoop(
            model,
            optimizer,
            TensorDataset(samples),
            epochs=4,
            batch_size=batch_size,
            num_shards=num_shards,
            batch_range=(16, 512) if has_range else None,
            state={"scaler": scaler} if scaler else None,
            **options,
        )
        for iteration in loop:
            for (x,) in iteration.shards():
                loss: Any = sum(part(half).mean() for part, half in zip(model, x.chunk(2, dim=1), strict=True))
                iteration.backward(loss, scaler=scaler)
            iteration.exchange()
            assert not iteration.metrics, "it is not seen as a metric"
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

    Context().run(train)
    return session.noise_scale


@pytest.mark.parametrize("mean", [0.5, 0.25])
@pytest.mark.parametrize(("batch_size", "num_shards"), [(32, 4), (64, 8), (256, 8)])
def test_it_is_that_of_the_problem_whatever_the_batch(mean: float, batch_size: int, num_shards: int) -> None:
    """The variance of a sample's gradient is 1 in each dimension, and the mean gradient is ``mean`` in each."""
    found = measured(mean=mean, batch_size=batch_size, num_shards=num_shards)
    assert found == pytest.approx(1 / mean**2, rel=0.2)


def test_a_gradient_scaler_does_not_change_it() -> None:
    assert measured(mean=0.5, scale=1024.0) == pytest.approx(measured(mean=0.5), rel=1e-4)


@pytest.mark.parametrize("micro_batch_size", [None, 8, 30])
def test_in_fast_mode_a_worker_alone_knows_it_from_its_passes(micro_batch_size: int | None) -> None:
    """Their sizes may differ by a sample. Without a limit it computes a batch in two now and then."""
    found = measured(mean=0.5, mode="fast", micro_batch_size=micro_batch_size)
    assert found == pytest.approx(4.0, rel=0.3)


def test_a_job_without_a_range_does_not_measure_it() -> None:
    assert measured(mean=0.5, has_range=False) is None
