"""Steps that evaluate a closure several times: the bits of the plain loop, undone as a whole, mistakes named."""

from collections.abc import Callable
from contextvars import Context
from threading import enumerate as all_threads
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.training import ElasticLoop, seed
from resile_learner.collectives.exchange import ExchangeRound
from resile_learner.collectives.spec import Abandoned, RoundSpec
from resile_learner.messages import Ready
from resile_learner.session import SoloSession, enter_session
from resile_learner.state.run import RunState
from resile_learner.training.data.batches import BatchPlan
from resile_learner.training.digest import params_sha256
from resile_learner.training.seeds import mix, seed_all
from resile_shared.errors import UsageError

from .shard_bodies import prepare

EPOCHS = 2
SIZE, BATCH = 40, 16


class Sharpness(torch.optim.SGD):
    """Evaluates its closure at the parameters and a little uphill, and steps with the second gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        moves = [0.05 * each.grad for each in parameters]
        torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.5, max_iter=4),
    "line search": lambda parameters: torch.optim.LBFGS(parameters, max_iter=5, line_search_fn="strong_wolfe"),
    "sharpness": lambda parameters: Sharpness(parameters, lr=0.1, momentum=0.9),
}


def data() -> TensorDataset:
    x = torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def network(norm: Any = nn.BatchNorm1d) -> nn.Module:
    seed(0)
    return nn.Sequential(nn.Linear(3, 8), norm(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))


def plainly(name: str) -> str:
    """The loop without Resile: its batches in the same order, its random numbers seeded alike."""
    model, inputs = network(nn.Identity), data().tensors
    optimizer = OPTIMIZERS[name](model.parameters())
    order = BatchPlan(SIZE, BATCH, 1, seed=0)
    for number in range(EPOCHS * order.per_epoch):
        x, y = (each[order.batch(order.position(number)).indices] for each in inputs)

        def closure(number: int = number, x: Tensor = x, y: Tensor = y) -> Tensor:
            seed_all(mix(0, "compute", number, 0))
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]
    return params_sha256(model)


def prepared(
    name: str,
    num_shards: int = 4,
    session: SoloSession | None = None,
    finish: Any = lambda loss, loader: loss,
    norm: Any = nn.BatchNorm1d,
) -> Any:
    if session:
        enter_session(session)
    model = network(norm)
    optimizer = OPTIMIZERS[name](model.parameters())
    loader: Any = DataLoader(data(), batch_size=BATCH, shuffle=True)
    _, _, loader = prepare(model, optimizer, loader, num_shards=num_shards)
    whole = []
    for _ in loader.epochs(EPOCHS):
        for x, y in loader:
            x *= 2  # in place: each evaluation is given a batch of its own
            x -= 0.5 * x

            def closure(x: Tensor = x, y: Tensor = y) -> Any:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                return finish(loss, loader)

            optimizer.step(closure)
            if loader.sync_gradients:
                whole.append(loader.loss)
    return loader.result, whole


def written(name: str, num_shards: int = 4, session: SoloSession | None = None, value: Any = None) -> Any:
    if session:
        enter_session(session)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    loop = ElasticLoop(model, optimizer, data(), epochs=EPOCHS, batch_size=BATCH, num_shards=num_shards)
    losses = []
    for iteration in loop:

        def closure() -> Any:
            for x, y in iteration.shards():  # noqa: B023
                iteration.backward(F.mse_loss(model(x), y))  # noqa: B023
            iteration.exchange()  # noqa: B023
            return iteration.loss if value is None else value(iteration)  # noqa: B023

        optimizer.step(closure)
        losses.append(iteration.loss)
    return loop.result, losses


def alone(call: Callable[[], Any]) -> Any:
    return Context().run(call)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_with_a_closure_has_the_bits_of_the_plain_loop(name: str) -> None:
    result, whole = alone(lambda: prepared(name, num_shards=1, norm=nn.Identity))  # changes of buffers are rounded
    assert result.params_sha256 == alone(lambda: plainly(name))
    assert len(whole) == result.iterations == EPOCHS * 3
    assert result.samples_seen == EPOCHS * SIZE, "a sample counts once, however often it was evaluated"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_prepared_and_a_written_loop_have_the_same_bits(name: str) -> None:
    by_prepare, by_hand = alone(lambda: prepared(name)), alone(lambda: written(name))
    assert by_prepare[0].params_sha256 == by_hand[0].params_sha256
    assert by_prepare[1] == by_hand[1], "the loss is that before the update"


class Interrupted(SoloSession):
    """Loses a member in some rounds, and goes on with the state that it has."""

    def __init__(self, *lost: int) -> None:
        super().__init__()
        self.numbers: list[int] = []
        self._lost = list(lost)
        self._num_begun = 0

    def join(self, ready: Ready, state: RunState) -> bool:
        self._state = state
        return super().join(ready, state)

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        opened = super().begin(spec)
        self.numbers.append(spec.tag.round)
        self._num_begun += 1
        if self._num_begun in self._lost:

            def finish(header: bytes, *, may_leave: bool) -> tuple[bytes, ...]:
                raise Abandoned(1, "it was killed")

            opened.finish = finish  # type: ignore[method-assign]
        return opened

    def recover(self, lost: Abandoned, *, next_round: int, state: RunState) -> bool:
        return False


@pytest.mark.parametrize("run", [prepared, written])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_member_that_is_lost_between_two_evaluations_undoes_the_step(run: Any, name: str) -> None:
    undisturbed = alone(lambda: run(name))
    for lost in ((2,), (3,), (3, 5), (4, 9)):
        session = Interrupted(*lost)
        result, losses = alone(lambda session=session: run(name, session=session))  # type: ignore[misc]
        assert result == undisturbed[0]
        assert [each for each in losses if each is not None][-3:] == undisturbed[1][-3:]
        assert len(session.numbers) > len(set(session.numbers)), "the iteration was repeated from its first round"
    assert [each.name for each in all_threads()].count("optimizer step") == 0


def missing(iteration: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (lambda: written("lbfgs", value=missing), "the closure returned 0.0, and the loss of its gradients is"),
        (lambda: written("lbfgs", value=lambda it: it.exchange()), "exchange.. was called a second time"),
        (lambda: prepared("lbfgs", finish=lambda loss, _: None), "the closure returned None, and the loss"),
        (lambda: prepared("lbfgs", finish=lambda loss, _: loss * 2), "the closure returned"),
        (lambda: stepped("after"), "called outside of a batch, twice in a batch, or after backward"),
        (lambda: stepped("twice"), "called outside of a batch, twice in a batch, or after backward"),
        (lambda: stepped("between"), "called outside of a batch, twice in a batch, or after backward"),
        (lambda: stepped("lazy"), "the optimizer did not call the closure"),
    ],
)
def test_wrong_use_of_a_closure_is_named(run: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        alone(run)
    assert [each.name for each in all_threads()].count("optimizer step") == 0


class Lazy(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return None


def stepped(how: str) -> None:
    model = network()
    optimizer = (Lazy if how == "lazy" else torch.optim.SGD)(model.parameters(), lr=0.1)
    _, _, loader = prepare(model, optimizer, DataLoader(data(), batch_size=BATCH))
    for _ in loader.epochs(EPOCHS):
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                loss = F.mse_loss(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            if how == "after":
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step(closure)
            if how == "twice":
                optimizer.step(closure)
        if how == "between":
            optimizer.step(closure)
