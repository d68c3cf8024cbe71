"""State as data: what goes in comes out, and what cannot go in is named."""

import contextlib
import enum
import math
import struct
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from resile_learner.state.flat import allocate, flatten, specs, unflatten
from resile_learner.state.memory import ByteStream, StateError, joined_bytes, tensor_bytes

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def through_bytes(tree: Any) -> Any:
    """Take a state apart, carry its bytes to newly made tensors, and put it together."""
    flat = flatten(tree)
    received = allocate(flat.skeleton)
    for source, target in zip(flat.tensors, received, strict=True):
        tensor_bytes(target)[:] = tensor_bytes(source)
    return unflatten(flat.skeleton, received)


def same(left: Any, right: Any) -> bool:
    """Equal in type, order and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.stride() == right.stride()
            and tensor_bytes(left.contiguous()) == tensor_bytes(right.contiguous())
        )
    if isinstance(left, np.ndarray | np.generic):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    return bool(left == right)


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


tensors = st.builds(random_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple))
arrays = st.sampled_from(
    [
        np.arange(12, dtype=">i4").reshape(3, 4),
        np.array(2.5),
        np.arange(10)[::-2],
        np.array(["a", "bcd"]),
        np.zeros((0, 3), dtype=np.float32),
        np.array(["2026-01-01"], dtype="M8[ns]"),
        np.array([1 + 2j], dtype=np.complex64),
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.str_("x"),
    ]
)
keys = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
plain = st.none() | st.booleans() | st.integers() | st.integers(-(2**80), 2**80) | st.floats() | st.text() | st.binary()
special = st.sampled_from([torch.Size([2, 0]), torch.float8_e5m2, torch.device("cuda:1"), torch.device("cpu")])
trees = st.recursive(
    plain | special | tensors | arrays,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_a_state_comes_back_as_it_was(tree: Any) -> None:
    assert same(through_bytes(tree), tree)


@pytest.mark.parametrize(
    "value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1.0, 2**64, -(2**63) - 1, True]
)
def test_numbers_are_exact(value: float) -> None:
    assert same(through_bytes([value]), [value])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_shape_keep_their_bytes(dtype: torch.dtype) -> None:
    tree = [random_tensor(dtype, shape) for shape in [(), (1,), (3, 2), (0, 2)]]
    assert same(through_bytes(tree), tree)


def test_ordered_and_default_dicts_are_read_as_dicts_in_order() -> None:
    tree = {"a": OrderedDict([("z", 1), ("b", 2)]), "b": defaultdict(int, {3: 4, (1, "x"): 5})}
    assert same(through_bytes(tree), {"a": {"z": 1, "b": 2}, "b": {3: 4, (1, "x"): 5}})


def test_the_state_of_an_optimizer_goes_on_as_if_nothing_had_happened() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.linspace(0, 1, 2 * 3 * 64).reshape(2, 3, 8, 8)).square().sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    state = through_bytes({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model2, optimizer2 = make()
    model2.load_state_dict(state["model"])
    optimizer2.load_state_dict(state["optimizer"])
    step(model, optimizer)
    step(model2, optimizer2)
    assert same(dict(model2.state_dict()), dict(model.state_dict()))
    assert same(optimizer2.state_dict(), optimizer.state_dict())


def test_tied_parameters_are_stored_once_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    flat = flatten(model.state_dict())
    assert [spec.path for spec in specs(flat.skeleton)] == ["0.weight"]
    tree = unflatten(flat.skeleton, flat.tensors)
    assert tree["0.weight"] is tree["1.weight"]


def test_a_dimension_of_one_element_keeps_its_stride() -> None:
    pointwise = torch.randn(8, 6, 1, 1).to(memory_format=torch.channels_last)
    tree = [pointwise, torch.randn(3, 1).t(), torch.empty(0, 1).as_strided((0, 1), (7, 7)), torch.randn(2, 1, 3)]
    assert same(through_bytes(tree), tree)


def test_views_that_differ_are_stored_each() -> None:
    base = torch.arange(6.0)
    tree = [base, base[:3], base.view(2, 3), base.view(2, 3).t(), base[::2], base.expand(2, 6), torch.tensor(1j).conj()]
    result = through_bytes(tree)
    assert all(torch.equal(a, b) for a, b in zip(tree, result, strict=True))
    assert len({tensor.data_ptr() for tensor in result}) == len(tree)


def test_nothing_is_copied_when_a_state_is_taken_apart() -> None:
    weight = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    counts = np.arange(5)
    flat = flatten({"weight": weight, "counts": counts})
    weight.data += 1
    counts += 1
    tree = unflatten(flat.skeleton, flat.tensors)
    assert torch.equal(tree["weight"], weight)
    assert tree["weight"].stride() == weight.stride()
    assert not tree["weight"].requires_grad
    assert tree["counts"].tolist() == [1, 2, 3, 4, 5]


def test_targets_of_the_same_dtype_and_layout_receive_in_place() -> None:
    source = {
        "model": {
            "a": torch.ones(3),
            "b": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "c": torch.ones(2),
        }
    }
    target = {
        "model/a": nn.Parameter(torch.zeros(3)),
        "model/b": torch.zeros_like(source["model"]["b"]),
        "model/c": torch.zeros(2, 1),
    }
    flat = flatten(source)
    rooms = allocate(flat.skeleton, target)
    assert [room.data_ptr() == value.data_ptr() for room, value in zip(rooms, target.values(), strict=True)] == [
        True,
        True,
        False,
    ]
    for room, tensor in zip(rooms, flat.tensors, strict=True):
        tensor_bytes(room)[:] = tensor_bytes(tensor)
    assert torch.equal(target["model/b"], source["model"]["b"])
    assert not target["model/c"].any()


@pytest.mark.parametrize(
    "target",
    [torch.zeros(3, dtype=torch.float64), torch.zeros(6)[::2], torch.zeros(3, device="meta"), torch.zeros(4)],
    ids=["dtype", "gaps", "device", "shape"],
)
def test_other_targets_are_left_alone(target: torch.Tensor) -> None:
    (room,) = allocate(flatten([torch.ones(3)]).skeleton, {"0": target})
    assert room.shape == (3,)
    assert room.is_contiguous()
    assert target.is_meta or not torch.equal(torch.tensor(room.data_ptr()), torch.tensor(target.data_ptr()))


def test_one_memory_is_never_the_target_of_two_tensors() -> None:
    flat = flatten({"a": torch.ones(3), "b": torch.zeros(3)})
    shared = torch.empty(3)
    first, second = allocate(flat.skeleton, {"a": shared, "b": shared})
    assert first.data_ptr() == shared.data_ptr() != second.data_ptr()


def test_bytes_of_many_tensors_are_joined_in_order() -> None:
    tensors = [torch.tensor(7), torch.arange(6.0).view(2, 3).T, torch.empty(0, dtype=torch.bool), torch.tensor([True])]
    expected = b"".join(bytes(tensor_bytes(tensor.contiguous())) for tensor in tensors)
    assert joined_bytes(iter(tensors)) == expected
    assert joined_bytes([]) == b""


def test_bytes_of_a_tensor_are_its_memory() -> None:
    tensor = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    view = tensor_bytes(tensor)
    view[:] = struct.pack("<HH", 0x3F80, 0xBF80)
    assert tensor.tolist() == [1.0, -1.0]
    assert len(tensor_bytes(torch.empty(0, 3))) == 0
    with pytest.raises(StateError, match="not contiguous"):
        tensor_bytes(torch.zeros(4)[::2])


class Colour(enum.IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"optimizer": {"state": [{"a b": object()}]}}, r"optimizer\.state\[0\]\['a b'\] is a builtins\.object"),
        ([Colour.RED], r"\[0\] is a .*Colour"),
        ({"p": Pair(1, 2)}, r"p is a .*Pair"),
        ({"f": lambda: None}, "f is a builtins.function"),
        ({"s": {1, 2}}, "s is a builtins.set"),
        ({"s": torch.eye(2).to_sparse()}, r"s is a Tensor of torch.float32, torch.sparse_coo"),
        ({"m": torch.zeros(2, device="meta")}, r"m is a Tensor .* on meta"),
        ({"o": np.array([object()])}, "o is a numpy.ndarray"),
        ({torch.zeros(1): 1}, "the state has tensors as keys"),
        ({"t": "\ud800"}, "t is a string that is not valid Unicode"),
        (object(), "the state is a builtins.object"),
    ],
)
def test_what_cannot_be_stored_is_named(tree: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        flatten(tree)


def test_a_state_that_contains_itself_is_refused() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(StateError, match="contains itself"):
        flatten({"a": tree})


def test_the_deepest_state_that_is_accepted_can_be_read() -> None:
    tree: Any = 1
    for _ in range(60):
        tree = {"a": (tree,)} if _ % 2 else {"b": tree}
        try:
            flat = flatten(tree)
        except StateError:
            break
        assert unflatten(flat.skeleton, []) == tree


GOOD = orjson.loads(flatten({"a": torch.zeros(2, 3), "b": [1]}).skeleton)


@pytest.mark.parametrize(
    "skeleton",
    [
        b"",
        b"\x80\x04pickle",
        b"[]",
        b"{}",
        orjson.dumps({**GOOD, "format": 2}),
        orjson.dumps({**GOOD, "tensors": None}),
        orjson.dumps({**GOOD, "tensors": [{**GOOD["tensors"][0], "dtype": "float31"}]}),
        orjson.dumps({**GOOD, "tensors": [{**GOOD["tensors"][0], "dtype": "load"}]}),
        orjson.dumps({**GOOD, "tensors": [{**GOOD["tensors"][0], "dtype": 3}]}),
        orjson.dumps({**GOOD, "tensors": [{**GOOD["tensors"][0], "shape": [-2, -3]}]}),
        orjson.dumps({**GOOD, "tensors": [{**GOOD["tensors"][0], "num_bytes": 23}]}),
        orjson.dumps({**GOOD, "tensors": [{**GOOD["tensors"][0], "dims": [0, 0]}]}),
        *(
            orjson.dumps({**GOOD, "tensors": [{**GOOD["tensors"][0], "strides": strides}]})
            for strides in ([9, 1], [3, 2], [3], [-3, 1], ["3", 1], [3.0, 1], 3)
        ),
        orjson.dumps({**GOOD, "tree": {"pickle": "x"}}),
        orjson.dumps({**GOOD, "tree": {"dict": [], "list": []}}),
        orjson.dumps({**GOOD, "tree": {"tensor": 7}}),
        orjson.dumps({**GOOD, "tree": {"tensor": "x"}}),
        orjson.dumps({**GOOD, "tree": {"dict": [["a", 1], ["a", 2]]}}),
        orjson.dumps({**GOOD, "tree": {"dict": [[[], 1]]}}),
        orjson.dumps({**GOOD, "tree": {"dict": 3}}),
        orjson.dumps({**GOOD, "tree": {"array": [0, "O", [1]]}}),
        orjson.dumps({**GOOD, "tree": {"array": [0, ",i8", [1]]}}),
        orjson.dumps({**GOOD, "tree": {"array": [0, "<f4", [7]]}}),
        orjson.dumps({**GOOD, "tree": {"float": "00"}}),
        orjson.dumps({**GOOD, "tree": {"int": "x"}}),
        orjson.dumps({**GOOD, "tree": {"bytes": "?"}}),
        orjson.dumps({**GOOD, "tree": {"device": "moon"}}),
        orjson.dumps(GOOD).replace(b"[1]", b"[" * 900 + b"]" * 900),
    ],
)
def test_a_malformed_skeleton_is_refused_clearly(skeleton: bytes) -> None:
    with pytest.raises(StateError, match="stored state"):
        unflatten(skeleton, [torch.zeros(2, 3)])


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damage_to_a_skeleton_is_never_more_than_a_state_error(data: st.DataObject) -> None:
    flat = flatten({"a": torch.zeros(2, 3), "b": [1, 2.5, (None, 2**70)], "c": np.arange(3), 4: b"xyz", "d": math.inf})
    skeleton = bytearray(flat.skeleton)
    for _ in range(data.draw(st.integers(1, 3))):
        skeleton[data.draw(st.integers(0, len(skeleton) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(StateError):
        unflatten(bytes(skeleton), flat.tensors)


def test_tensors_that_do_not_belong_to_a_skeleton_are_refused() -> None:
    flat = flatten({"a": torch.zeros(2, 3)})
    with pytest.raises(StateError, match="has 1 tensors, but 0"):
        unflatten(flat.skeleton, [])
    with pytest.raises(StateError, match=r"stored tensor a is torch.float32 \[2, 3\]"):
        unflatten(flat.skeleton, [torch.zeros(3, 2)])


@given(st.lists(st.binary(max_size=5)), st.integers(0, 30), st.integers(0, 30))
def test_a_stream_is_its_buffers_back_to_back(buffers: list[bytes], start: int, stop: int) -> None:
    stream = ByteStream(memoryview(buffer) for buffer in buffers)
    whole = b"".join(buffers)
    assert stream.num_bytes == len(whole)
    assert b"".join(stream.cut(start, stop)) == whole[start:stop]


def test_a_state_with_too_much_beside_its_tensors_is_refused_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"model": {"w": torch.ones(4)}, "extras": {"step": 1, "history": {"losses": [0.25] * 700_000}}}
    assert flatten(tree).skeleton
    monkeypatch.setattr("resile_learner.state.flat.MAX_SKELETON_BYTES", 2 << 20)
    message = r"has 3 MiB beside its tensors, at most 2 MiB .* part is extras\.history\.losses: store .* in a tensor"
    with pytest.raises(StateError, match=message):
        flatten(tree)
    tree["extras"]["history"]["losses"] = torch.full((700_000,), 0.25)
    assert flatten(tree).skeleton
