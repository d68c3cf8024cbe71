"""Digests: recomputed independently, equal everywhere, without side effects."""

import hashlib
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resile_learner.state.flat import flatten, unflatten
from resile_learner.training.digest import RollingDigest, bits_of, dataset_digest, params_sha256, state_digest


def recomputed(arrays: dict[str, Any]) -> str:
    sha = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        sha.update(name.encode() + b"\0" + str(array.dtype).encode() + b"\0")
        sha.update(",".join(str(size) for size in array.shape).encode() + b"\0")
        sha.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def test_the_digest_of_a_model_can_be_computed_with_numpy_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(3, 2, bias=False).double())
    model.register_buffer("mask", torch.tensor([True, False]))
    assert "1.num_batches_tracked" in model.state_dict()
    assert params_sha256(model) == recomputed({name: t.detach().numpy() for name, t in model.state_dict().items()})
    assert params_sha256(model) == params_sha256(dict(reversed(model.state_dict().items())))


def test_the_digest_of_other_dtypes_is_that_of_their_bytes() -> None:
    tensor = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    expected = hashlib.sha256(b"a\0bfloat16\0" + b"2\0" + bytes.fromhex("803f00c0")).hexdigest()
    assert params_sha256({"a": tensor}) == expected
    assert params_sha256({"a": torch.tensor(1j).conj()}) == recomputed({"a": np.conj(np.complex64(1j))})
    assert params_sha256({"a": torch.empty(0, 2), "b": "extra state"}) == recomputed(
        {"a": np.empty((0, 2), np.float32)}
    )


def test_the_digest_does_not_depend_on_the_order_in_memory() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    other = tensor.to(memory_format=torch.channels_last)
    assert other.stride() != tensor.stride()
    assert params_sha256({"a": tensor}) == params_sha256({"a": other})


@pytest.mark.parametrize(
    "changed",
    [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": -torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(0)},
    ],
    ids=["name", "shape", "dtype", "sign of zero", "entry"],
)
def test_the_digest_tells_models_apart(changed: dict[str, torch.Tensor]) -> None:
    assert params_sha256(changed) != params_sha256({"a": torch.zeros(2, 3)})


class Samples:
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.samples[index]


class Augmented(Samples):
    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), np.random.rand(2), random.random(), self.samples[index]


def test_random_augmentation_gives_the_same_digest_and_disturbs_no_generator() -> None:
    dataset = Augmented(list(range(50)))
    torch.manual_seed(1)
    first = dataset_digest(dataset)
    drawn = torch.rand(2), np.random.rand(), random.random()
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    assert dataset_digest(dataset) == first
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert torch.equal(torch.rand(2), drawn[0])


def test_the_generators_are_put_back_when_a_sample_cannot_be_read() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            torch.rand(1)
            raise OSError("disk")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="disk"):
        dataset_digest(Broken([1]))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_the_last_and_the_same_others_are_looked_at() -> None:
    datasets = [Samples(list(range(1000))) for _ in range(2)]
    for dataset in datasets:
        dataset_digest(dataset, num_probes=8)
    assert datasets[0].read == datasets[1].read
    assert len(datasets[0].read) == 8
    assert {0, 999} < set(datasets[0].read)
    small = Samples([5, 6])
    dataset_digest(small)
    assert small.read == [0, 1]
    dataset_digest(Samples([]))


class Image:
    """Like PIL's: says how to become an array, and is none."""

    def __init__(self, pixel: int) -> None:
        self.kept = np.full((2, 2), pixel, np.uint8)
        self.__array_interface__ = self.kept.__array_interface__


class Opaque:
    pass


SAMPLES: list[Any] = [
    torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(1, 3), torch.ones(3), torch.eye(2).to_sparse(),
    np.zeros(3), np.zeros(3, np.float32), np.float32(1), np.int64(1), 1, 1.0, True, -0.0, 0.0, 2j, None,
    "1", b"1", "", "\ud800", (1,), [1], (1, (2, 3)), ((1, 2), 3), {"a": 1}, {"b": 1}, {"a": (1, "x")},
    Image(1), Image(2), Opaque(),
]  # fmt: skip


def test_samples_that_differ_have_different_digests() -> None:
    digests = [dataset_digest(Samples([sample])) for sample in SAMPLES]
    assert len(set(digests)) == len(SAMPLES)
    assert dataset_digest(Samples([Image(2)])) == dataset_digest(Samples([Image(2)]))


def test_objects_without_readable_content_count_by_their_type() -> None:
    assert dataset_digest(Samples([Opaque()])) == dataset_digest(Samples([Opaque()]))
    assert dataset_digest(Samples([np.array([Opaque()])])) == dataset_digest(Samples([np.array([Opaque()])]))


def test_a_change_anywhere_is_seen_within_as_many_rounds_as_there_are_windows() -> None:
    tensors = [torch.zeros(n) for n in (5, 3000, 1, 20_000, 0)] + [torch.zeros(64, 9, 9, dtype=torch.bfloat16)]
    windows = sum(t.nbytes for t in tensors) // (16 * 1024) + 1
    digest = RollingDigest(tensors)
    before = [digest.at(k) for k in range(windows)]
    assert before == [RollingDigest(tensors).at(k + 5 * windows) for k in range(windows)]
    assert all(0 <= value < 2**64 for value in before)
    for tensor in tensors:
        if tensor.numel():
            tensor.view(-1)[-1] += 1
            after = [digest.at(k) for k in range(windows)]
            assert sum(a != b for a, b in zip(after, before, strict=True)) == 1
            tensor.view(-1)[-1] -= 1


def test_a_parameter_that_is_given_new_memory_is_followed() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    digest = RollingDigest([parameter])
    before = digest.at(0)
    parameter.data = torch.ones(4)
    assert digest.at(1) != before
    assert digest.at(1) == RollingDigest([torch.ones(4)]).at(0)


def test_tensors_with_gaps_and_models_without_parameters_do_no_harm() -> None:
    assert RollingDigest([torch.zeros(4)[::2]]).at(3) == RollingDigest([]).at(0)


STATES: dict[str, Any] = {
    "values": {
        "best": 0.1,
        "nan": math.nan,
        "left": 3,
        "names": ["a", None],
        "seen": (1, 2),
        5: b"x",
        "np": np.float64(2),
    },
    "average": nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200)).state_dict(),
    "scaler": torch.amp.GradScaler("cpu").state_dict(),
    "array": {"history": np.arange(5.0), "strided": torch.arange(12).view(3, 4).t()},
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_has_the_same_digest_where_it_was_received(kind: str) -> None:
    flat = flatten(STATES[kind])
    received = unflatten(flat.skeleton, [tensor.clone() for tensor in flat.tensors])
    assert state_digest(received) == state_digest(STATES[kind])
    assert state_digest(dict(reversed(received.items()))) == state_digest(STATES[kind])


@pytest.mark.parametrize("size", [4, 1 << 16])
def test_the_digest_of_a_state_tells_values_and_tensors_apart(size: int) -> None:
    changed = torch.zeros(size)
    changed[size // 2] = 1e-30
    states = [
        {"a": torch.zeros(size)},
        {"a": changed},
        {"a": torch.zeros(1, size)},
        {"b": torch.zeros(size)},
        {"a": 0.0},
    ]
    assert len({state_digest(state) for state in states}) == len(states)


def test_the_digest_of_a_state_tells_filled_tensors_apart() -> None:
    assert state_digest(torch.full((4,), 1.0)) != state_digest(torch.full((4,), 2.0))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(33, 5),
        torch.randn(7)[1:],  # does not begin at a multiple of eight bytes
        torch.randn(6, 4).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(5).bfloat16(),
        torch.randn(3, dtype=torch.complex64),
        torch.tensor(1.0),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_the_bits_of_a_tensor_show_a_change_of_any_element(tensor: torch.Tensor) -> None:
    before = int(bits_of(tensor))
    assert int(bits_of(tensor.clone())) == before
    for index in itertools.product(*map(range, tensor.shape)):
        changed = tensor.clone()
        changed[index] += 1
        assert int(bits_of(changed)) != before


def test_nothing_and_sparse_gradients_have_no_bits() -> None:
    assert [int(bits_of(each)) for each in (None, torch.eye(3).to_sparse(), torch.zeros(0))] == [0, 0, 0]
