"""Tensors whose values are obtained where they are first used, and batches of which a worker reads its own rows."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from resile_learner.training.data.batches import Indices
from resile_learner.training.data.fetch import Fetched, Fetcher, ShardKey
from resile_learner.training.division.deferred import Deferred, is_deferred, rows_of, values_of
from resile_learner.training.division.reading import OwnRows
from resile_shared.errors import UsageError

VALUES = torch.arange(12.0).reshape(6, 2)
INDICES = np.array([7, 3, 0, 9, 1, 5])


class Known:
    """A source whose values are known."""

    has_rows = True
    num_asked = 0

    def values(self, tensor: Deferred) -> Tensor:
        self.num_asked += 1
        return VALUES.clone()

    def rows(self, rows: slice) -> Tensor:
        return VALUES[rows].clone()


def deferred() -> Deferred:
    return Deferred(Known(), VALUES.shape, VALUES.dtype, VALUES.device)


@pytest.mark.parametrize(
    "ask",
    [
        len,
        Tensor.dim,
        Tensor.size,
        lambda x: x.size(0),
        lambda x: x.shape,
        lambda x: (x.dtype, x.device, x.ndim, x.is_cuda, x.layout),
        Tensor.numel,
        Tensor.is_floating_point,
        lambda x: isinstance(x, Tensor),
        lambda x: x.requires_grad,
    ],
)
def test_what_is_known_of_a_tensor_needs_no_values(ask: Callable[[Tensor], Any]) -> None:
    tensor = deferred()
    assert ask(tensor) == ask(VALUES)
    assert is_deferred(tensor)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x + 1,
        lambda x: 1 - x,
        lambda x: x.view(-1, 3),
        lambda x: x[1:3],
        lambda x: torch.stack([x, x]),
        lambda x: torch.cat([VALUES, x], dim=1),
        lambda x: torch.nn.functional.linear(x, torch.ones(3, 2)),
        lambda x: torch.ops.aten.add(x, x),
        lambda x: torch.from_numpy(np.asarray(x) + 1),
        lambda x: torch.tensor(x.tolist()),
        lambda x: x.data,
        lambda x: torch.stack(list(x)),
        lambda x: copy.deepcopy(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.tensor([float(x[2, 1]), x.sum().item()]),
        lambda x: x.clone().mul_(2),
        lambda x: torch.vmap(lambda row: row * 2)(x),
        lambda x: torch.empty_like(x).copy_(x),
    ],
)
def test_what_is_done_with_a_tensor_is_done_with_its_values(use: Callable[[Tensor], Tensor]) -> None:
    found = use(deferred())
    assert type(found) is Tensor
    assert torch.equal(found, use(VALUES.clone()))


def test_values_are_obtained_once_and_may_be_changed_in_place() -> None:
    tensor = deferred()
    tensor += 1
    tensor = deferred()
    tensor.mul_(2)
    tensor[0] = 5
    tensor.requires_grad_()
    assert values_of(tensor)[0].tolist() == [5, 5]
    assert (tensor[1:] == 2 * VALUES[1:]).all()
    assert tensor.source.num_asked == 1  # type: ignore[attr-defined]
    tensor.sum().backward()
    assert torch.equal(tensor.grad, torch.ones(6, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.float64),
        lambda x: x.to("cpu", torch.int64, non_blocking=True),
        lambda x: x.to(torch.ones(1, dtype=torch.float16)),
        Tensor.half,
        lambda x: x.long().float(),
    ],
)
def test_other_types_of_values_are_deferred_as_well(convert: Callable[[Tensor], Tensor]) -> None:
    tensor, expected = deferred(), convert(VALUES)
    found = convert(tensor)
    assert is_deferred(found)
    assert is_deferred(tensor)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(rows_of(found, slice(2, 4)), expected[2:4])
    assert is_deferred(found)
    assert torch.equal(found + 0, expected)


def test_rows_have_the_memory_format_of_the_whole() -> None:
    images = torch.rand(4, 3, 5, 5)

    class Images(Known):
        def values(self, tensor: Deferred) -> Tensor:
            return images

        def rows(self, rows: slice) -> Tensor:
            return images[rows]

    tensor = Deferred(Images(), images.shape, images.dtype, images.device)
    found = tensor.to("cpu", memory_format=torch.channels_last)
    assert is_deferred(found)
    assert rows_of(found, slice(1, 3)).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(rows_of(found, slice(1, 3)), images[1:3])


def test_a_converted_tensor_has_the_values_from_before_a_change_in_place() -> None:
    tensor = deferred()
    converted, copied = tensor.double(), tensor.to(torch.float32, False, True)
    tensor.zero_()
    assert torch.equal(converted + 0, VALUES.double())
    assert torch.equal(copied + 0, VALUES)


def test_what_is_changed_in_place_is_the_same_tensor() -> None:
    tensor = deferred()
    other = tensor
    tensor += 1
    assert tensor is other
    assert tensor.add_(1) is tensor
    assert torch.add(tensor, 1, out=tensor) is tensor
    assert tensor.requires_grad_() is tensor


def test_a_gradient_that_does_not_reach_the_values_is_refused() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    tensor = deferred().requires_grad_()
    with pytest.raises(UsageError, match=r"give it a copy, as in `x = x.clone\(\).requires_grad_\(\)`"):
        Same.apply(tensor).sum().backward()  # type: ignore[no-untyped-call]


def test_the_name_of_a_type_is_that_of_the_tensor() -> None:
    assert deferred().type() == "torch.FloatTensor"
    assert repr(deferred()) == repr(VALUES)


class Read:
    """Reads samples, and notes which."""

    def __init__(self) -> None:
        self.indices: list[int] = []
        generator = torch.Generator().manual_seed(0)
        self.dataset = TensorDataset(torch.rand(10, 20_000, generator=generator), torch.arange(10))
        self._fetcher = Fetcher(self.dataset, seed=0)

    def __call__(self, indices: Indices) -> Fetched:
        self.indices += indices.tolist()
        return self._fetcher.read(ShardKey(0, indices))

    def own(self, held: slice) -> OwnRows:
        return OwnRows(INDICES, held, self(INDICES[held]), read=self)


@pytest.mark.parametrize("held", [slice(0, 2), slice(2, 5), slice(4, 6), slice(0, 6)])
def test_rows_of_a_batch_are_read_once_and_only_if_they_are_used(held: slice) -> None:
    read = Read()
    images, labels = default_collate([read.dataset[index] for index in INDICES])
    batch = read.own(held)
    assert read.indices == INDICES[held].tolist()
    assert torch.equal(rows_of(batch.data[0], held), images[held])
    assert batch.indices(held).tolist() == INDICES[held].tolist()
    assert read.indices == INDICES[held].tolist()
    assert torch.equal(batch.data[0] + 0, images)
    assert torch.equal(batch.data[1] + 0, labels)
    assert sorted(read.indices) == sorted(INDICES.tolist())
    assert batch.used_bytes == images.nbytes + labels.nbytes


def test_rows_that_another_worker_held_are_read_when_it_is_lost() -> None:
    read = Read()
    batch = read.own(slice(0, 2))
    assert torch.equal(rows_of(batch.data[0], slice(3, 5)), read.dataset.tensors[0][INDICES[3:5]])
    assert batch.indices(slice(3, 5)).tolist() == INDICES[3:5].tolist()
    assert read.indices == [*INDICES[:2], *INDICES[3:5]]
    assert torch.equal(batch.data[1] + 0, torch.from_numpy(INDICES))


def test_small_tensors_that_others_send_are_not_read() -> None:
    read = Read()
    batch = read.own(slice(0, 2))
    assert batch.sent == ["[1]"]
    others = [Read().own(slice(lo, lo + 2)).sent_of(slice(lo, lo + 2)) for lo in (0, 2, 4)]
    assert batch.take(others)
    assert (batch.data[1] == torch.from_numpy(INDICES)).all()
    assert read.indices == INDICES[:2].tolist()
    assert batch.used_bytes == 0


class Ratings:
    """Numbers, of which only some are whole."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return index if index % 2 else index + 0.1


@pytest.mark.parametrize("is_sent", [True, False])
def test_numbers_have_the_type_that_a_whole_batch_has(is_sent: bool) -> None:
    """PyTorch makes a tensor of integers, of floats, or of both, by the numbers that it is given."""
    fetcher = Fetcher(Ratings(), seed=0)
    expected = default_collate([Ratings()[index] for index in INDICES.tolist()])

    def read(indices: Indices) -> Fetched:
        return fetcher.read(ShardKey(0, indices))

    batch = OwnRows(INDICES, slice(0, 2), read(INDICES[:2]), read=read)
    assert (batch.data.dtype, expected.dtype) == (torch.int64, torch.float32)
    if is_sent:
        held = [slice(lo, lo + 2) for lo in (0, 2, 4)]
        others = [OwnRows(INDICES, rows, read(INDICES[rows]), read=read).sent_of(rows) for rows in held]
        assert not batch.take(others)
    else:
        batch.data.sum()
    assert batch.data.dtype == expected.dtype
    assert torch.equal(batch.data + 0, expected)
