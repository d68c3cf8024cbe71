"""Every optimizer of PyTorch trains parameters of every layout as a plain loop does, bit for bit."""

from collections.abc import Callable, Iterable
from contextvars import Context

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop, seed
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.state.flat import allocate
from resile_learner.state.memory import tensor_bytes
from resile_learner.state.optimizer import OptimizerState
from resile_learner.state.run import RunState
from resile_learner.training.data.batches import BatchPlan, Position

SAMPLES, EPOCHS = 16, 4
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    **{
        f"{kind.__name__}-{variant}": lambda p, kind=kind, variant=variant: kind(p, **{variant: True})  # type: ignore[misc]
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for variant in ("fused", "foreach")
    },
    "SGD-momentum-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "AdamW-amsgrad-fused": lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
    **{
        kind.__name__: kind
        for kind in (
            torch.optim.SGD,
            torch.optim.Adam,
            torch.optim.AdamW,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.ASGD,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.RMSprop,
            torch.optim.Rprop,
            torch.optim.Adamax,
        )
    },
}


class EveryLayout(nn.Module):
    """Parameters in channels_last and transposed order, with gaps, 0-dim, tied, of three dtypes, and seldom used."""

    def __init__(self, *, gaps: bool) -> None:
        super().__init__()
        self.front = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.pointwise = nn.Conv2d(8, 6, 1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(5, 6).t())
        self.slices = nn.Parameter(torch.randn(5, 10)[:, ::2] if gaps else torch.randn(5, 5))
        self.scale = nn.Parameter(torch.ones(()))
        self.tied = nn.Linear(5, 5)
        self.tied_again = nn.Linear(5, 5)
        self.tied_again.weight = self.tied.weight
        self.wide = nn.Linear(5, 4).double()
        self.narrow = nn.Linear(4, 2).bfloat16()
        self.seldom = nn.Parameter(torch.zeros(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.pointwise(self.front(x).relu()).mean((2, 3))
        x = torch.tanh(x @ self.turned @ self.slices) * self.scale
        x = self.tied_again(torch.tanh(self.tied(x)))
        y = self.narrow(self.wide(x.double()).bfloat16()).float()
        self.calls += 1
        return y + self.seldom if self.calls % 2 else y


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum((1, 2, 3)) > 0).long())


def by_a_plain_loop(make: Make, *, gaps: bool) -> EveryLayout:
    seed(0)
    model = EveryLayout(gaps=gaps)
    optimizer = make(model.parameters())
    x, y = data().tensors
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for number in range(EPOCHS):
        indices = BatchPlan(SAMPLES, SAMPLES, 1, seed=0).batch(Position(number)).indices
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.set_num_threads(threads)
    return model


def elastically(make: Make, *, gaps: bool) -> EveryLayout:
    seed(0)
    model = EveryLayout(gaps=gaps)
    optimizer = make(model.parameters())
    loop = ElasticLoop(model, optimizer, data(), epochs=EPOCHS, batch_size=SAMPLES, num_shards=1)
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(nn.functional.cross_entropy(model(inputs), targets))
        if iteration.exchange():
            optimizer.step()
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_shard_gives_the_parameters_of_a_plain_loop(name: str) -> None:
    # PyTorch's fused optimizers update a parameter with gaps wrongly by themselves.
    gaps = not name.endswith("fused")
    expected = by_a_plain_loop(OPTIMIZERS[name], gaps=gaps)
    trained = Context().run(elastically, OPTIMIZERS[name], gaps=gaps)
    for (path, parameter), plain in zip(trained.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, plain), path


def one_step(model: EveryLayout, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = data().tensors
    optimizer.zero_grad()
    model.calls = number
    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def run_state(model: EveryLayout, optimizer: torch.optim.Optimizer) -> RunState:
    return RunState(model, {"optimizer": OptimizerState(optimizer)}, {}, after_load=lambda: None)


def kinds_of_state(optimizer: torch.optim.Optimizer) -> list[object]:
    parts = [optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return [[(key, part.dtype, part.stride()) for key, part in each.items() if torch.is_tensor(part)] for each in parts]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_worker_that_takes_the_state_over_makes_the_same_updates(name: str) -> None:
    seed(0)
    model, other = EveryLayout(gaps=False), EveryLayout(gaps=False)
    optimizer, others = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    for number in range(3):
        one_step(model, optimizer, number)
    flat = run_state(model, optimizer).flatten()
    received = run_state(other, others)
    for target, source in zip(received.allocate_buffers(flat.skeleton), flat.tensors, strict=True):
        tensor_bytes(target)[:] = tensor_bytes(source)
    received.load_received()
    assert kinds_of_state(others) == kinds_of_state(optimizer)
    for number in range(3, 6):
        one_step(model, optimizer, number)
        one_step(other, others, number)
    for (path, parameter), same in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(parameter, same), path


def test_a_script_keeps_the_groups_and_the_learning_rate_that_it_holds_when_a_state_is_loaded() -> None:
    """Whoever wrote to an older object would change nothing, in silence."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": torch.tensor(0.5)}])
    newer = OptimizerState(optimizer).state_dict()
    newer["optimizer"]["param_groups"][0] |= {"lr": torch.tensor(0.25), "weight_decay": 0.1, "initial_lr": 0.5}
    groups, group = optimizer.param_groups, optimizer.param_groups[0]
    group |= {"momentum_of_the_script": 1.0}
    rate = group["lr"]
    OptimizerState(optimizer).load_state_dict(newer)
    assert optimizer.param_groups is groups
    assert optimizer.param_groups[0] is group
    assert group["lr"] is rate
    assert group["params"] == [weight]
    assert (rate.item(), group["weight_decay"], group["initial_lr"]) == (0.25, 0.1, 0.5)
    assert "momentum_of_the_script" not in group
    weight.grad = torch.ones(1)
    rate.fill_(2.0)
    optimizer.step()
    assert weight.item() == -2.0


def test_a_state_is_received_and_stored_in_main_memory_whatever_the_default_device() -> None:
    seed(0)
    model = EveryLayout(gaps=False)
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    torch.set_default_device("meta")
    try:
        flat = run_state(model, optimizer).flatten()
        received = allocate(flat.skeleton)
        stored = Snapshot(flat)
    finally:
        torch.set_default_device(None)
    assert {tensor.device.type for tensor in received} == {"cpu"}
    assert b"".join(stored.part(0))[: len(flat.skeleton)] == flat.skeleton
