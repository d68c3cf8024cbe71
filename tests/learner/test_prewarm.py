"""A worker that joins has loaded what its first step needs, and is as if it had not."""

import pickle
import random
from collections.abc import Callable
from functools import partial

import pytest
import torch

from resile_learner.training import prewarm


def test_each_accelerator_takes_a_step_before_the_worker_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it lacks an operation of the step; a CPU is warm from the imports."""
    taken: list[torch.device] = []
    probe_digest = prewarm.probe_digest

    def record(device: torch.device) -> str:
        taken.append(device)
        return probe_digest(device)

    monkeypatch.setattr(prewarm, "probe_digest", record)
    meta = torch.device("meta")  # has no values: the step fails at its end
    with pytest.raises(RuntimeError):
        probe_digest(meta)
    prewarm.prewarm_devices([torch.device("cpu"), meta])
    assert taken == [meta]


def test_the_step_draws_no_random_numbers_and_changes_no_setting() -> None:
    def state() -> tuple[object, ...]:
        settings = torch.get_deterministic_debug_mode(), torch.is_grad_enabled(), torch.get_default_dtype()
        return random.getstate(), torch.get_rng_state().numpy().tobytes(), settings

    before = state()
    with torch.no_grad():
        prewarm.probe_digest(torch.device("cpu"))
    assert state() == before


OPTIMIZERS = [
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.LBFGS,
    torch.optim.SparseAdam,
    partial(torch.optim.Adam, capturable=True),
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_of_the_optimizer_is_tried_without_a_trace(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Also of one that takes no such step: LBFGS needs a closure, SparseAdam sparse gradients, another one a GPU."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    before = pickle.dumps(optimizer.state_dict())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    drawn = torch.get_rng_state()
    prewarm.prewarm_optimizer(optimizer)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(parameter.grad is None for parameter in model.parameters())
    assert pickle.dumps(optimizer.state_dict()) == before
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(("kind", "times"), [(torch.optim.AdamW, 3), (torch.optim.Adagrad, 2), (torch.optim.SGD, 1)])
def test_memory_of_state_and_gradients_is_touched(
    kind: Callable[..., torch.optim.Optimizer], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all parameters, the optimizer's own number of times and once for gradients; not of blocks that are unmapped
    when they are freed."""
    monkeypatch.setattr(prewarm, "_KEPT_BLOCK_BYTES", 1000)
    large = torch.nn.Parameter(torch.ones(500))
    parameters = [torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.ones(7, 2)), large]
    touched: list[torch.Size] = []
    zeros_like = torch.zeros_like

    def record(tensor: torch.Tensor, **options: object) -> torch.Tensor:
        touched.append(tensor.shape)
        return zeros_like(tensor)

    def refuse(tensor: torch.Tensor, memo: object) -> torch.Tensor:
        assert tensor.shape == torch.Size(), "only scalars of the state are copied"
        return tensor.clone()

    optimizer = kind(parameters, lr=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros_like", record)
        patched.delattr(torch.nn.Parameter, "__deepcopy__")  # no parameter is copied
        patched.setattr(torch.Tensor, "__deepcopy__", refuse)
        prewarm.prewarm_optimizer(optimizer)
    assert touched.count(torch.Size([7, 2])) == times
    assert large.shape not in touched
