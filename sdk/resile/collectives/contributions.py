"""The values of one all-reduce: those of this member's shards, folded in the tree while they come.

A value is a tensor or a list of tensors. All tensors of a value that have one dtype lie in one flat bucket.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from resile_learner.collectives.tree import Interval, merges_after
from resile_shared.errors import UsageError

Value = Tensor | Sequence[Tensor]
DTYPES = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    }
)


class Signature(NamedTuple):
    """Dtypes and shapes of a value."""

    is_list: bool
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]

    def __str__(self) -> str:
        each = [
            f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            for dtype, shape in zip(self.dtypes, self.shapes, strict=True)
        ]
        return f"[{', '.join(each)}]" if self.is_list else each[0]


class Contributions:
    """Partial sums over ``pieces``, the complete subtrees that a member holds, for ``num_leaves`` leaves.

    Raises UsageError if ``values`` are not one for each leaf of ``pieces``, all alike, or have a dtype that cannot be
    added.
    """

    def __init__(self, values: Iterable[Value], pieces: Sequence[Interval], num_leaves: int) -> None:
        self._devices: tuple[torch.device, ...] = ()
        self._signature: Signature | None = None
        self._dtypes: tuple[torch.dtype, ...] = ()
        folded: list[list[Tensor]] = []
        remaining = iter(values)
        num_given = 0
        num_held = sum(piece.hi - piece.lo for piece in pieces)
        for piece in pieces:
            for leaf in range(*piece):
                value = next(remaining, None)
                if value is None:
                    raise _wrong_number(num_given, num_held)
                num_given += 1
                folded.append(self._buckets(value))
                for _ in range(merges_after(num_leaves, leaf, piece)):
                    right = folded.pop()
                    for mine, other in zip(folded[-1], right, strict=True):
                        torch.add(mine, other, out=mine)
        if next(remaining, None) is not None:
            raise _wrong_number(num_given + 1 + sum(1 for _ in remaining), num_held)
        self.partials = [list(bucket) for bucket in zip(*folded, strict=True)]
        """The partial sums, as [bucket][piece]."""
        self.sums = [bucket[0] for bucket in self.partials]
        """For each bucket, the tensor that receives the sum."""

    @property
    def signature(self) -> Signature:
        """The signature of each value."""
        assert self._signature is not None
        return self._signature

    def check_mean(self) -> None:
        """Raises UsageError if the values have no mean of their dtype."""
        if integers := [dtype for dtype in self._dtypes if not dtype.is_floating_point]:
            name = str(integers[0]).removeprefix("torch.")
            raise UsageError(f'{name} tensors have no mean: pass op="sum", or tensors of a floating-point dtype')

    def result(self, divisor: int | None) -> Tensor | list[Tensor]:
        """Return the sums in the form of a value, divided by ``divisor`` where one is given."""
        if divisor is not None:
            for total in self.sums:
                total.div_(divisor)
        buckets = dict(zip(self._dtypes, self.sums, strict=True))
        offsets = dict.fromkeys(self._dtypes, 0)
        tensors = []
        signature = self.signature
        for dtype, shape, device in zip(signature.dtypes, signature.shapes, self._devices, strict=True):
            first = offsets[dtype]
            offsets[dtype] = first + shape.numel()
            tensors.append(buckets[dtype][first : offsets[dtype]].view(shape).to(device))
        return tensors if signature.is_list else tensors[0]

    def _buckets(self, value: Value) -> list[Tensor]:
        """Copy a value into one flat tensor for each dtype."""
        tensors = list(value) if isinstance(value, Sequence) else [value]
        for tensor in tensors:
            _check(tensor)
        signature = Signature(
            not isinstance(value, Tensor),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.shape for tensor in tensors),
        )
        if self._signature is None:
            if not tensors:
                raise UsageError("a list without tensors was given: there is nothing to reduce")
            self._signature = signature
            self._devices = tuple(tensor.device for tensor in tensors)
            self._dtypes = tuple(dict.fromkeys(signature.dtypes))
        elif signature != self._signature:
            raise UsageError(f"the values of two shards differ: {self._signature} and {signature}")
        return [_flat([tensor for tensor in tensors if tensor.dtype == dtype]) for dtype in self._dtypes]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """A new flat CPU tensor with all elements."""
    flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=tensors[0].dtype, device="cpu")
    first = 0
    for tensor in tensors:
        flat[first : first + tensor.numel()].view(tensor.shape).copy_(tensor.detach())
        first += tensor.numel()
    return flat


def _check(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"a {type(tensor).__name__} was given for a shard: pass a tensor, or a list of tensors")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise UsageError("a sparse, quantized or meta tensor cannot be reduced: pass a dense one")
    if tensor.dtype not in DTYPES:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in DTYPES))
        raise UsageError(f"{str(tensor.dtype).removeprefix('torch.')} tensors cannot be reduced: pass one of {names}")


def _wrong_number(num_given: int, num_held: int) -> UsageError:
    return UsageError(f"{num_given} values were given for {num_held} shards: pass one for each of group.shards")
