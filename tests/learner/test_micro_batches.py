"""The mode fast with a limit of samples: a worker computes its share of a batch in several passes."""

from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.training import ElasticLoop, ElasticModel, prepare, seed
from resile_learner.collectives.tree import Interval
from resile_learner.messages import Ready
from resile_learner.session import SoloSession, enter_session
from resile_learner.state.run import RunState
from resile_learner.training.slots import local_plan
from resile_shared.errors import UsageError

SAMPLES = 101


class Heard(SoloSession):
    """Keeps what the workers report at their training call."""

    ready: Ready

    def join(self, ready: Ready, state: RunState) -> bool:
        self.ready, self.facts = ready, state.facts
        return super().join(ready, state)


class Net(nn.Module):
    """Notes how many samples each of its forward passes has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return self.layers(x)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 8, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )


class Trained:
    """One run of `ElasticLoop` on one worker."""

    def __init__(self, micro_batch_size: int | None = None, **options: Any) -> None:
        self.session = Heard()
        self.gradients: list[list[Tensor]] = []
        self.losses: list[float] = []
        Context().run(self._train, micro_batch_size, {"mode": "fast", "batch_size": 30, **options})

    def _train(self, micro_batch_size: int | None, options: dict[str, Any]) -> None:
        enter_session(self.session)
        seed(0)
        self.model = Net()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        loop = ElasticLoop(self.model, optimizer, data(), epochs=2, micro_batch_size=micro_batch_size, **options)
        for iteration in loop:
            for x, y in iteration.shards():
                iteration.backward(F.cross_entropy(self.model(x), y))
            if iteration.exchange():
                assert iteration.loss is not None
                self.gradients.append([p.grad.clone() for p in self.model.parameters() if p.grad is not None])
                self.losses.append(iteration.loss)
                optimizer.step()
        self.result = loop.result


@pytest.mark.parametrize("limit", [1, 4, 7, 16, 29])
def test_gradients_of_several_passes_are_those_of_one(limit: int) -> None:
    """The batches of an epoch have 30, 30, 30 and 11 samples, which passes of 7 do not divide."""
    whole, cut = Trained(), Trained(limit)
    assert max(whole.model.sizes) == 30
    assert max(cut.model.sizes) <= limit
    assert sum(cut.model.sizes) == 2 * SAMPLES
    assert len(cut.gradients) == len(whole.gradients) == 8
    assert cut.losses == pytest.approx(whole.losses, rel=1e-5)
    for ours, theirs in zip(cut.gradients, whole.gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert cut.result is not None
    assert cut.result.samples_seen == 2 * SAMPLES


def test_passes_are_equal() -> None:
    assert Trained(16, batch_size=32).model.sizes[:4] == [16, 16, 16, 16]
    assert Trained(20, batch_size=32).model.sizes[:4] == [16, 16, 16, 16], "and not 20 and 12"


def test_a_share_that_fits_is_computed_in_one_pass() -> None:
    assert Trained(30).model.sizes == Trained().model.sizes == [30, 30, 30, 11] * 2


def test_a_share_needs_the_memory_of_one_sum_however_many_passes_it_has() -> None:
    plan = local_plan(5, Interval(2, 3), 9)
    assert plan.pieces == (Interval(2, 3),)
    assert [(step.slot, step.adds, step.merges) for step in plan.steps] == [(0, False, ())] + 8 * [(0, True, ())]


def test_the_scheduler_is_told() -> None:
    assert Trained(5).session.ready.micro_batch_size == 5
    assert Trained().session.ready.micro_batch_size is None


def test_a_run_may_be_resumed_with_another_limit() -> None:
    """As after it ran out of memory."""
    assert Trained(5).session.facts == Trained().session.facts != {}


def test_a_validation_has_no_larger_passes() -> None:
    def train() -> list[int]:
        seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ElasticModel(model, lambda: (data(), data()), F.cross_entropy, optimizer).train(
            batch_size=50, mode="fast", micro_batch_size=9, num_shards=1
        )
        return model.sizes

    sizes = Context().run(train)
    assert max(sizes) <= 9
    assert sum(sizes) == 2 * SAMPLES


def prepared(batch_size: int, **options: Any) -> list[int]:
    """The sizes of the passes of an ordinary loop over one epoch."""

    def train() -> list[int]:
        seed(0)
        model, optimizer, loader = prepare(
            net := Net(), torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data(), batch_size), **options
        )
        num_batches = 0
        for _ in loader.epochs(1):
            assert len(loader) > 1
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                num_batches += 1
            assert num_batches == len(loader)
        return net.sizes

    return Context().run(train)


def test_an_ordinary_loop_gets_a_batch_for_each_pass() -> None:
    assert prepared(50, mode="fast", micro_batch_size=25) == [25, 25, 17, 17, 17], "51 samples are left at last"


def test_accumulated_batches_of_an_ordinary_loop_are_as_large_as_its_loader_makes_them() -> None:
    assert max(prepared(10, mode="fast", accumulate=5)) == 10
    assert max(prepared(10, mode="fast", accumulate=5, micro_batch_size=5)) == 5


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size is 0: use 1 or more, or leave it out"),
        ({"micro_batch_size": -3}, "micro_batch_size is -3: use 1 or more"),
        ({"micro_batch_size": 8, "mode": "same-bits"}, 'micro_batch_size is 8, and mode is "same-bits", where each'),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Trained(**options)
