"""What a worker that joins knows of the variables of a loop: which ones travel, and what becomes of them."""

import dataclasses
import random
import sys
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from resile_learner.state.flat import flatten, unflatten
from resile_learner.training.division import values
from resile_learner.training.division.body_loader import _Asked
from resile_learner.training.division.deferred import Deferred, Stored, has_rows, is_deferred
from resile_learner.training.division.frames import assigned_first, frames_of, write_back
from resile_learner.training.division.values import LargeValue, OpaqueValue, Values, restore
from resile_learner.training.division.variables import LoopVariables


class Point(NamedTuple):
    x: int
    y: int


class Meter:
    """An object of a script."""

    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self.values = [total]
        self.lines = iter("abc")  # which cannot travel


class Node:
    """An object that refers to itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.me = self


def travelled(value: Any, present: Any = None) -> Any:
    """The value as a worker restores it that has ``present``."""
    flat = flatten(Values([]).encode(value))
    assert not flat.tensors, "members may differ in their variables, but not in the tensors of the state"
    return restore(present, unflatten(flat.skeleton, flat.tensors))


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -(2**70), 1.5, float("inf"), 2 + 3j, "text", b"bytes", np.float32(1.5)),
        *([1, [2, "x"]], (1, (2,)), {"a": [1], 2: None}, {1, 2}, frozenset({"a"}), deque([1, 2])),
        *(OrderedDict(b=1, a=2), Counter("aab")),
    ],
    ids=repr,
)
def test_values_travel(value: Any) -> None:
    restored = travelled(value)
    assert restored == value
    assert type(restored) is type(value)


def test_tensors_and_arrays_travel() -> None:
    tensor, array = torch.arange(6.0).reshape(2, 3).T, np.arange(4).reshape(2, 2)
    assert torch.equal(travelled(tensor), tensor)
    assert np.array_equal(travelled([array])[0], array)
    assert travelled(Point(1, 2), Point(0, 0)) == Point(1, 2)


def test_a_batch_that_is_kept_is_obtained_only_where_it_travels() -> None:
    known = Values([])
    kept = [Deferred(Stored(torch.arange(3.0)), (3,), torch.float32, torch.device("cpu")) for _ in range(2)]
    assert known.mark(kept[0]) == known.mark(kept[0]) != known.mark(kept[1])
    assert is_deferred(kept[0])
    given = restore(None, known.encode(kept[0]))
    assert has_rows(given)
    assert torch.equal(given + 0, torch.arange(3.0))


def test_what_others_refer_to_is_filled_again() -> None:
    present: dict[str, Any] = {"list": [0], "dict": {"old": 1}, "set": {0}, "deque": deque([0, 0], maxlen=2)}
    present |= {"tensor": torch.zeros(2), "model": nn.Linear(2, 1), "meter": Meter(), "node": Node(1)}
    inside = dict(present)
    given = {"list": [1, 2], "dict": {"new": 2}, "set": {3}, "deque": deque([0, 9], maxlen=2)}
    given |= {"tensor": torch.full((2,), 4.0), "model": nn.Linear(2, 1), "meter": Meter(7.0), "node": Node(5)}
    nn.init.ones_(given["model"].weight)
    restored = travelled(given, present)
    assert restored is present
    assert all(restored[name] is inside[name] for name in inside)
    assert (restored["list"], restored["dict"], restored["set"]) == ([1, 2], {"new": 2}, {3})
    assert restored["deque"] == deque([0, 9])
    assert restored["deque"].maxlen == 2
    assert restored["tensor"].tolist() == [4, 4]
    assert restored["model"].weight.tolist() == [[1, 1]]
    assert (restored["meter"].total, restored["meter"].values) == (7.0, [7.0])
    assert (restored["node"].count, restored["node"].me) == (5, restored["node"])


@pytest.mark.parametrize("value", [iter([1]), open, lambda: 0, threading.Lock(), [object()]], ids=lambda each: "")
def test_what_is_no_value_does_not_travel(value: Any) -> None:
    with pytest.raises(OpaqueValue):
        Values([]).encode(value)


@pytest.mark.parametrize(
    "value", [torch.zeros(100), [b"x" * 100] * 3, np.zeros(100), {n: n for n in range(100)}], ids=lambda each: ""
)
def test_a_large_value_does_not_travel(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_BYTES", 200)
    with pytest.raises(LargeValue):
        Values([]).encode(value)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], lambda value: value.append(3)),
        (lambda: [[1], [2]], lambda value: value[1].append(3)),
        (lambda: {"a": 1}, lambda value: value.update(a=2)),
        (lambda: {1}, lambda value: value.add(2)),
        (lambda: torch.zeros(3), lambda value: value.add_(1)),
        (lambda: np.zeros(3), lambda value: value.__setitem__(1, 5)),
        (lambda: nn.Linear(1, 1), lambda value: nn.init.constant_(value.weight, 3.0)),
        (Meter, lambda value: value.values.append(2)),
        (lambda: SimpleNamespace(best=1), lambda value: setattr(value, "best", 2)),
        (lambda: Node(1), lambda value: setattr(value, "count", 2)),
    ],
    ids=lambda each: "",
)
def test_a_value_that_changed_in_place_is_noticed(make: Callable[[], Any], change: Callable[[Any], object]) -> None:
    value, known = make(), Values([])
    before = known.mark(value)
    assert known.mark(value) == before
    change(value)
    assert known.mark(value) != before


def test_a_value_of_another_type_is_noticed() -> None:
    assert Values([]).mark(1) != Values([]).mark(1.0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    step: int


class Slotted:
    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


def test_objects_of_the_script_travel_also_to_where_it_has_made_none() -> None:
    shared = {"loss": 1.5}
    given = {"frozen": Frozen(3), "slotted": Slotted(4), "meter": Meter(2.0), "best": shared, "all": [shared]}
    present = {"frozen": Frozen(0), "slotted": Slotted(0)}
    for restored in (travelled(given), travelled(given, present)):
        assert (restored["frozen"], restored["slotted"].count) == (Frozen(3), 4)
        assert isinstance(restored["meter"], Meter)
        assert restored["meter"].values == [2.0]
        assert restored["all"][0] is restored["best"]
        assert restored["best"] == {"loss": 1.5}
    assert travelled(deque([1, 2], maxlen=2)).maxlen == 2


def test_two_objects_that_return_new_states_are_not_confused() -> None:
    models = [nn.Linear(1, 1) for _ in range(20)]
    present = [nn.Linear(1, 1) for _ in range(20)]
    travelled(models, present)
    assert [each.weight.item() for each in present] == [each.weight.item() for each in models]


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (random.Random, lambda value: value.random()),
        (np.random.default_rng, lambda value: value.random()),
        (np.random.RandomState, lambda value: value.random_sample()),
        (lambda seed: torch.Generator().manual_seed(seed), lambda value: torch.rand((), generator=value).item()),
    ],
    ids=lambda each: "",
)
def test_random_generators_go_on(make: Callable[[int], Any], draw: Callable[[Any], float]) -> None:
    given, present = make(1), make(2)
    before = Values([]).mark(given)
    draw(given)
    assert Values([]).mark(given) != before
    travelled(given, present)
    assert draw(present) == draw(given)


def test_a_tensor_that_is_written_through_data_is_noticed() -> None:
    value, known = torch.zeros(3), Values([])
    before = known.mark(value)
    value.data.add_(1)
    assert known.mark(value) != before


def first_assigned(loop: str, *, setup: str = "") -> set[str]:
    """What the body of ``loop`` over ``watched`` assigns first, in a module."""
    watched = Watched()
    exec(compile(f"{setup}\nfor item in watched:\n{loop}", "<script>", "exec"), {"watched": watched, "total": 0})
    return watched.assigned[0]


def test_what_may_not_be_reached_or_is_read_elsewhere_is_not_assigned_first() -> None:
    assert first_assigned("    a = item\n    b = a") == {"item", "a", "b"}
    assert first_assigned("    a = 1\n    if item:\n        continue\n    b = 2") == {"item", "a"}
    assert first_assigned("    try:\n        a = 1\n    except KeyError:\n        pass\n    b = 2") == {"item", "b"}
    reads = "def f():\n    return (lambda: a)()\na = 0"
    assert first_assigned("    f()\n    a = 1\n    b = 2", setup=reads) == {"item", "b"}


def test_what_is_in_the_state_already_does_not_travel() -> None:
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, nn.Linear(2, 1))
    known = Values([model])
    marks = [known.mark(each) for each in (model, first, first.weight)]
    nn.init.ones_(first.weight)
    assert [known.mark(each) for each in (model, first, first.weight)] == marks
    given = known.encode([model, first, first.weight, 3])
    assert restore([1, 2, 4, 8], given) == [1, 2, 4, 3]


def looked_at(frame: FrameType, *, outermost: FrameType | None = None) -> list[str]:
    return [each.f_code.co_name for each in frames_of(frame, outermost and id(outermost))]


def test_frames_are_those_between_the_batches_and_the_epochs() -> None:
    here = sys._getframe()

    def train_epoch() -> list[str]:
        return looked_at(sys._getframe(), outermost=here)

    assert train_epoch() == ["train_epoch", "test_frames_are_those_between_the_batches_and_the_epochs"]
    assert looked_at(here) == ["test_frames_are_those_between_the_batches_and_the_epochs"]


class Watched:
    """Notes, when it is asked for an item, what the body assigns first; sets ``total`` before the last one."""

    def __init__(self) -> None:
        self.left = 3
        self.assigned: list[set[str]] = []

    def __iter__(self) -> "Watched":
        return self

    def __next__(self) -> int:
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        frame = sys._getframe(1)
        self.assigned.append(assigned_first(frame))
        if self.left == 0:
            frame.f_locals["total"] = 100
            write_back(frame)
        return self.left


def test_what_the_body_assigns_first_is_known_and_the_rest_can_be_set() -> None:
    watched, total, best, newest = Watched(), 0, None, None
    for number, item in enumerate(watched):
        double = item * 2 + number
        if double > 2:
            best = double
        squares = [each * double for each in range(2)]
        total += sum(squares)
        newest = best
    # A comprehension reads `double`, in Python 3.11 as a function of its own.
    assert [each - {"double"} for each in watched.assigned] == [{"number", "item", "squares", "newest"}] * 3
    assert total == 100 + 2
    assert newest == 3


def test_a_variable_that_is_too_large_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MAX_BYTES", 100)
    said: list[str] = []
    variables, table, count = LoopVariables([], None, said.append), torch.zeros(100), 0
    state: dict[str, Any] = {}
    for _ in range(2):
        with variables.seen_from(sys._getframe()):
            variables.begin()
            table += 1
            count += 1
            state = variables.state_dict()
    (names,) = [scope for name, scope in state.items() if "too_large" in name]
    assert names["count"] == 2
    assert "table" not in names
    assert len([line for line in said if line.startswith("table is changed by the loop")]) == 1


class CountingLoss(nn.Module):
    """A loss of a script that counts, keeps a bank of features, and has a part that does so, too."""

    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self.steps = steps
        self._seen = [steps]
        self.part = nn.Linear(2, 2) if steps < 0 else nn.Sequential()
        self.register_buffer("bank", torch.full((3,), float(steps)), persistent=False)
        self.line = iter("abc")  # which cannot travel


def test_modules_travel_with_their_attributes_and_all_their_buffers() -> None:
    present = CountingLoss()
    bank = present.bank
    made = travelled(CountingLoss(7), present)
    assert made is present
    assert (made.steps, made._seen, made.bank.tolist()) == (7, [7], [7.0] * 3)
    assert made.bank is bank
    assert next(made.line) == "a"


def test_a_library_s_object_with_tensors_travels() -> None:
    metric, present = MeanMetric(), MeanMetric()
    metric.update(torch.tensor([1.0, 2.0, 6.0]))
    assert travelled(metric, present).compute().item() == 3.0


class Average(nn.Module):
    """It refers to the model that it averages, as ema_pytorch does."""

    def __init__(self, online: nn.Module) -> None:
        super().__init__()
        self.online, self.average = online, nn.Linear(2, 1)


def test_an_average_that_refers_to_a_model_of_the_run_travels_without_it() -> None:
    def average() -> tuple[nn.Module, Average]:
        model = nn.Linear(2, 1)
        return model, Average(model)

    model, trained = average()
    other, present = average()
    before = other.weight.clone()
    encoded = Values([model]).encode(trained)
    restore(present, encoded)
    assert torch.equal(present.average.weight, trained.average.weight)
    assert torch.equal(other.weight, before)
    assert present.online is other


def test_sparse_tensors_are_compared_and_do_not_travel() -> None:
    sparse = torch.eye(3).to_sparse()
    marks = Values([nn.Linear(1, 1)])
    assert marks.mark(sparse) == marks.mark(sparse)
    with pytest.raises(OpaqueValue):
        marks.encode(sparse)


class Labelled:
    """A dataset of a script, whose labels its body changes."""

    def __init__(self) -> None:
        self.labels = [0] * 5


def test_what_the_body_changes_in_the_loader_s_dataset_travels() -> None:
    dataset, joined = Labelled(), Labelled()
    frame = sys._getframe()
    variables, others = LoopVariables([], dataset, print), LoopVariables([], joined, print)
    for each in (variables, others):
        with each.seen_from(frame, is_outermost=True):
            each.begin()
    with variables.seen_from(frame, is_outermost=True):
        assert variables.state_dict()["loader.dataset"] == {}
        dataset.labels[2] = 7
        state = variables.state_dict()
    others.load_state_dict({"loader.dataset": state["loader.dataset"]})
    with others.seen_from(frame, is_outermost=True):
        others.restore()
    assert joined.labels == [0, 0, 7, 0, 0]


def around(batches: Any) -> Any:
    yield from batches


@pytest.mark.parametrize(
    ("wrapped", "numbers", "says"),
    [
        (lambda batches: enumerate(batches), [2, 3], False),
        (lambda batches: enumerate(around(batches)), [0, 1], True),
        (lambda batches: zip("abcd", around(batches), strict=False), ["a", "b"], True),
        (around, [5, 6], False),
    ],
)
def test_what_counts_around_a_generator_cannot_go_on_and_is_named(
    wrapped: Callable[[Any], Any], numbers: list[Any], says: bool
) -> None:
    said: list[str] = []
    asked = _Asked(iter([5, 6]), LoopVariables([], None, said.append), num_before=2)
    assert [each[0] if isinstance(each, tuple) else each for each in wrapped(asked)] == numbers
    assert len(said) == says
