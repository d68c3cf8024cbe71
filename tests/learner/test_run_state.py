"""A state is loaded into a model whose buffers changed in form since it was built."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from resile_learner.state.facts import StateDiffers
from resile_learner.state.flat import flatten, unflatten
from resile_learner.state.run import RunState
from resile_learner.training.script_state import State


class Model(nn.Module):
    """A layer and one buffer."""

    def __init__(self, buffer: Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("cache", buffer, persistent=False)
        self.cache: Tensor | None


def hand_over(donor: nn.Module, joiner: nn.Module) -> None:
    """Bring the state of ``donor`` to ``joiner``, as a joining worker receives it."""
    sent = run_state(donor).flatten()
    receiver = run_state(joiner)
    for target, source in zip(receiver.allocate_buffers(sent.skeleton), sent.tensors, strict=True):
        target.copy_(source)
    receiver.load_received()


def run_state(model: nn.Module) -> RunState:
    return RunState(model, {}, {}, after_load=lambda: None)


@pytest.mark.parametrize(
    ("built", "now"),
    [
        (lambda: None, lambda: torch.arange(4.0)),
        (lambda: torch.zeros(2), lambda: torch.arange(4.0)),
        (lambda: torch.zeros(4), lambda: torch.arange(4)),
        (lambda: torch.zeros(2, 3), lambda: torch.arange(6.0).view(3, 2).t()),
        (lambda: torch.ones(1).expand(4), lambda: torch.ones(1).expand(4)),
        (lambda: torch.ones(1).expand(4), lambda: torch.arange(4.0)),
        (lambda: torch.zeros(4), lambda: None),
    ],
    ids=["created", "grown", "dtype", "order", "expanded", "no longer expanded", "removed"],
)
def test_a_joiner_gets_the_buffers_that_training_created_or_replaced(
    built: Callable[[], Tensor | None], now: Callable[[], Tensor | None]
) -> None:
    donor, joiner = Model(built()), Model(built())
    donor.cache = expected = now()
    hand_over(donor, joiner)
    if expected is None:
        assert joiner.cache is None
    else:
        assert joiner.cache is not None
        assert torch.equal(joiner.cache, expected)
        assert joiner.cache.dtype == expected.dtype
        assert joiner.cache.data_ptr() != expected.data_ptr()
        assert joiner.cache.stride() == expected.clone().stride()
    assert "cache" not in joiner.state_dict()


def test_a_state_that_is_received_in_part_leaves_the_own_one_whole_if_that_is_kept() -> None:
    donor, receiver = Model(torch.ones(4)), Model(torch.zeros(4))
    state, expected = run_state(receiver), [tensor.clone() for tensor in receiver.state_dict().values()]
    sent = run_state(donor).flatten()
    for target in state.allocate_buffers(sent.skeleton, keeps_state=True):
        target.fill_(7)
    assert all(map(torch.equal, receiver.state_dict().values(), expected))
    for target, source in zip(state.allocate_buffers(sent.skeleton, keeps_state=True), sent.tensors, strict=True):
        target.copy_(source)
    state.load_received()
    assert all(map(torch.equal, receiver.state_dict().values(), donor.state_dict().values()))
    assert receiver.cache is not None
    assert receiver.cache.tolist() == [1.0] * 4


def test_memory_that_a_state_was_received_into_is_free_once_it_is_loaded() -> None:
    donor, receiver = Model(None), Model(None)
    state = run_state(receiver)
    skeleton = run_state(donor).flatten().skeleton
    received = [weakref.ref(tensor) for tensor in state.allocate_buffers(skeleton, keeps_state=True)]
    state.load_received()
    assert [each() for each in received] == [None] * len(received)


def test_a_buffer_of_the_same_form_keeps_its_memory() -> None:
    donor, joiner = Model(torch.arange(8.0)[::2]), Model(torch.zeros(8)[::2])
    buffer = joiner.cache
    hand_over(donor, joiner)
    assert joiner.cache is buffer
    assert joiner.cache.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_a_buffer_that_two_modules_shared_until_one_replaced_it_gets_both_values() -> None:
    def make() -> nn.ModuleList:
        shared = torch.zeros(2)
        return nn.ModuleList([Model(shared), Model(shared)])

    donor, joiner = make(), make()
    donor[1].cache = torch.ones(2)
    hand_over(donor, joiner)
    assert [each.cache.tolist() for each in joiner] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_model_that_registers_other_buffers_is_refused_by_name() -> None:
    other = Model(None)
    other.register_buffer("mask", torch.ones(1))
    with pytest.raises(StateDiffers, match=r"other parameters or buffers than the run's: mask\."):
        hand_over(other, Model(None))
    with pytest.raises(StateDiffers, match=r"other parameters or buffers than the run's: mask\."):
        hand_over(Model(None), other)


class Scaled(nn.Module):
    """A layer with state that PyTorch's state_dict has as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def test_modules_keep_their_mode_and_their_extra_state() -> None:
    donor, joiner = nn.Sequential(Scaled(), nn.Dropout()), nn.Sequential(Scaled(), nn.Dropout())
    donor[0].norm.eval()
    donor[0].scale = 0.5  # type: ignore[assignment]
    hand_over(donor, joiner)
    assert [module.training for module in joiner.modules()] == [True, True, False, True]
    assert joiner[0].scale == 0.5


class Times(State):
    may_differ = True


def test_extras_that_may_differ_are_loaded_as_others_from_older_states_too() -> None:
    def state_with(**values: float) -> RunState:
        extras = {"own": Times(**values), "shared": State(**values)}
        return RunState(nn.Linear(1, 1), {}, extras, after_load=lambda: None)

    flat = state_with(last=1.5).flatten()
    tree = unflatten(flat.skeleton, flat.tensors)
    older = {**tree, "extras": {**tree["extras"], **tree.pop("may_differ")}}
    for each in (flat, flatten(older)):
        joiner = state_with()
        joiner.load(each.skeleton, each.tensors)
        assert [extra.last for extra in joiner._extras.values()] == [1.5, 1.5]  # type: ignore[attr-defined]


def test_a_state_without_those_of_modules_is_loaded() -> None:
    model = Scaled()
    flat = run_state(model).flatten()
    tree = unflatten(flat.skeleton, flat.tensors)
    del tree["modules"]
    older = flatten(tree)
    model.scale = 2.0
    run_state(model).load(older.skeleton, older.tensors)
    assert (model.scale, model.training) == (2.0, True)
