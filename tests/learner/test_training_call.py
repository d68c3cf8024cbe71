"""The training call in a plain script: what it returns, and how it answers wrong use."""

import math
from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resile.training import Callback, ElasticLoop, ElasticModel, Iteration, Result, Validation, seed
from resile_learner.collectives.exchange import ExchangeRound
from resile_learner.collectives.spec import RoundSpec
from resile_learner.session import SoloSession, enter_session
from resile_learner.training.data.batches import BatchPlan, Position
from resile_learner.training.header import RoundHeader
from resile_shared.errors import ResileError, UsageError


def alone(call: Callable[[], Any]) -> Any:
    """Run ``call`` as a script of its own, with its one training call."""
    return Context().run(call)


def data(size: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def parts(**more: Any) -> ElasticModel:
    seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    arguments: dict[str, Any] = {"datasets": lambda: (data(), None), "loss_fn": nn.functional.cross_entropy} | more
    return ElasticModel(model, optimizer=optimizer, **arguments)


def train(**more: Any) -> Result:
    settings = {"epochs": 2, "batch_size": 16} | {
        k: more.pop(k) for k in ("epochs", "batch_size", "seed", "mode") if k in more
    }
    result = alone(lambda: parts(**more).train(**settings))
    assert isinstance(result, Result)
    return result


def test_training_lowers_the_loss_and_gives_the_same_bits_twice() -> None:
    losses: list[float] = []

    class Record(Callback):
        def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
            assert iteration.loss is not None
            losses.append(iteration.loss)

    first = train(callbacks=[Record()], epochs=20)
    assert losses[-1] < losses[0]
    assert len(losses) == first.iterations == 20 * 3
    assert train(epochs=20).params_sha256 == first.params_sha256


def test_one_shard_is_exactly_plain_sgd() -> None:
    """With one shard the wrapper adds nothing: the bits are those of the loop anyone would write."""
    x, y = data(16).tensors
    seed(0)
    plain = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(3):
        order = BatchPlan(16, 16, 1, seed=0).batch(Position(number)).indices
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x[order]), y[order]).backward()
        optimizer.step()
    torch.set_num_threads(threads)
    model = nn.Linear(4, 2)

    def elastic() -> None:
        seed(0)
        model.load_state_dict(nn.Linear(4, 2).state_dict())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        ElasticModel(model, lambda: (data(16), None), nn.functional.cross_entropy, sgd).train(
            epochs=3, batch_size=16, num_shards=1
        )

    alone(elastic)
    assert torch.equal(model.weight, plain.weight)


def test_the_loop_and_the_wrapper_give_the_same_bits() -> None:
    def by_hand() -> str:
        seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ElasticLoop(model, optimizer, data(), epochs=2, batch_size=16)
        for iteration in loop:
            for inputs, targets in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                optimizer.step()
        assert loop.result is not None
        return loop.result.params_sha256

    assert alone(by_hand) == train().params_sha256


def test_validation_does_not_disturb_training_and_scores_every_sample() -> None:
    seen: list[int] = []

    def scores(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert not model.training
        assert not torch.is_grad_enabled()
        seen.append(len(batch[0]))
        return {"one": torch.ones(())}

    def run() -> tuple[str, Any]:
        seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ElasticLoop(model, optimizer, data(), epochs=2, batch_size=16, validation=Validation(data(23), scores))
        for iteration in loop:
            for inputs, targets in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                optimizer.step()
        assert loop.result is not None
        return loop.result.params_sha256, loop.result.validation

    sha, validation = alone(run)
    assert sha == train().params_sha256
    assert validation == {"one": pytest.approx(1.0)}
    assert sum(seen) == 2 * 23


class Marked(nn.Linear):
    """Counts its calls, and what the script has marked."""

    calls: Tensor
    marks: Tensor

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("marks", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_what_a_validation_changes_in_buffers_is_taken_back_and_what_the_script_wrote_stays() -> None:
    def run() -> Marked:
        model = Marked()
        validation = Validation(data(23), lambda model, batch: {"mean": model(batch[0]).mean()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ElasticLoop(model, optimizer, data(32), epochs=1, batch_size=16, num_shards=4, validation=validation)
        for iteration in loop:
            for inputs, targets in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
            if iteration.exchange():
                optimizer.step()
                model.marks += 1
        return model

    model = alone(run)
    assert (model.calls, model.marks) == (2.0, 2.0), "a shard counts by its part of the batch"


def test_stop_ends_the_run_after_the_iteration() -> None:
    class StopEarly(Callback):
        def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
            if iteration.number == 3:
                loop.stop()

    assert train(callbacks=[StopEarly()]).iterations == 4


def test_a_grad_scaler_and_bf16_train() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    result = train(grad_scaler=scaler, autocast=torch.bfloat16)
    assert result.loss is not None
    assert math.isfinite(result.loss)


def test_a_member_that_has_computed_no_shard_can_unscale_gradients() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    alone(lambda: ElasticLoop(model, optimizer, data(), state={"scaler": scaler}))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 8.0)
    scaler.unscale_(optimizer)
    assert model.bias.grad is not None
    assert model.bias.grad.tolist() == [4.0, 4.0]


def test_a_scaler_that_joiners_would_not_receive_is_refused() -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        scaler = torch.amp.GradScaler("cpu")
        for iteration in ElasticLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), batch_size=16):
            for inputs, targets in iteration.shards():
                iteration.backward(nn.functional.cross_entropy(model(inputs), targets), scaler=scaler)

    with pytest.raises(UsageError, match="GradScaler is not part of the run's state"):
        alone(run)


def test_a_default_device_of_the_script_is_for_the_script_alone() -> None:
    samples = data()
    model = parts(datasets=lambda: (samples, samples))
    expected = train()
    torch.set_default_device("meta")
    try:
        result = alone(lambda: model.train(epochs=2, batch_size=16))
    finally:
        torch.set_default_device(None)
    assert result.params_sha256 == expected.params_sha256


def test_clipping_sees_the_gradient_of_the_whole_batch() -> None:
    assert (
        alone(lambda: parts().train(epochs=1, batch_size=16, clip_grad_norm=1e-9)).params_sha256
        != train().params_sha256
    )


@pytest.mark.parametrize(
    ("settings", "more", "says"),
    [
        ({"epochs": 0}, {}, "epochs is 0"),
        ({"batch_size": 0}, {}, "batch_size is 0"),
        ({"mode": "slow"}, {}, "same-bits"),
        ({"num_shards": 17}, {}, "num_shards is 17"),
        ({"checkpoint_every": "often"}, {}, "5 min"),
        ({"checkpoint_every": 0}, {}, "checkpoint_every is 0"),
        ({}, {"datasets": lambda: data()}, "return two things"),
        ({}, {"datasets": lambda: (TensorDataset(torch.zeros(0, 4)), None)}, "empty"),
        ({}, {"datasets": lambda: (iter([1]), None)}, "is an iterator, which can be read once"),
        ({}, {"datasets": lambda: ([1.0, 2.0] * 20, None)}, "pair"),
        ({}, {"loss_fn": lambda outputs, targets: outputs}, "scalar"),
        ({}, {"loss_fn": lambda outputs, targets: outputs.sum() * math.nan}, "NaN at iteration 0"),
    ],
)
def test_wrong_use_is_answered_with_what_to_do(settings: dict[str, Any], more: dict[str, Any], says: str) -> None:
    with pytest.raises(ResileError, match=says):
        alone(lambda: parts(**more).train(**{"epochs": 1, "batch_size": 16} | settings))


def test_a_second_training_call_is_refused() -> None:
    def twice() -> None:
        parts().train(batch_size=16)
        parts().train(batch_size=16)

    with pytest.raises(UsageError, match="one training call"):
        alone(twice)


def test_settings_of_torch_are_put_back() -> None:
    before = (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())
    train()
    assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before


@pytest.mark.parametrize("skipped", ["backward", "exchange", "shards"])
def test_a_loop_body_that_leaves_something_out_is_refused(skipped: str) -> None:
    def run() -> None:
        model = nn.Linear(4, 2)
        loop = ElasticLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), data(), batch_size=16, num_shards=2)
        for iteration in loop:
            if skipped != "shards":
                for inputs, targets in iteration.shards():
                    if skipped != "backward":
                        iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
            if skipped != "exchange":
                iteration.exchange()

    with pytest.raises(UsageError, match=skipped):
        alone(run)


def test_freezing_in_mid_run_is_refused() -> None:
    class Freeze(Callback):
        def on_iteration(self, loop: ElasticLoop, iteration: Iteration) -> None:
            model.bias.requires_grad_(False)

    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    elastic = ElasticModel(model, lambda: (data(), None), nn.functional.cross_entropy, sgd, callbacks=[Freeze()])
    with pytest.raises(UsageError, match="frozen or unfrozen"):
        alone(lambda: elastic.train(batch_size=16))


def test_the_first_round_compares_all_settings_that_must_be_equal() -> None:
    headers: list[bytes] = []

    class Recording(SoloSession):
        def begin(self, spec: RoundSpec) -> ExchangeRound:
            round_ = super().begin(spec)
            finish = round_.finish

            def recorded(header: bytes, *, may_leave: bool) -> tuple[bytes, ...]:
                headers.append(header)
                return finish(header, may_leave=may_leave)

            round_.finish = recorded  # type: ignore[method-assign]
            return round_

    def run() -> None:
        enter_session(Recording())
        parts().train(epochs=3, batch_size=16, clip_grad_norm=0.5)

    alone(run)
    first, second = (RoundHeader.decode(header, lambda _: torch.empty(0))[1].facts for header in headers[:2])
    expected = {"epochs": "3", "batch_size": "16", "clip_grad_norm": "0.5", "mode": "same-bits", "samples": "40"}
    assert expected.items() <= first.items()
    assert not expected.keys() & second.keys()
