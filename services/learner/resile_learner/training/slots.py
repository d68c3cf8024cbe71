"""Slots: storage for this worker's part of the fixed summation tree, in buckets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.tree import Interval, merges_after, pieces
from ..state.memory import in_memory_order

BUCKET_BYTES = 4 << 20
DEVICE_BUCKET_BYTES = 32 << 20
"""The size of a bucket for sums on a device: larger, for fewer and longer operations."""
ALIGNMENT_BYTES = 64
"""The alignment of every sum in a bucket, the same as the allocator's: vectorised kernels depend on it."""


@dataclass
class Bucket:
    """Tensors whose sums travel together: flat, of one dtype and device."""

    dtype: torch.dtype
    device: torch.device
    members: list[int]
    offsets: list[int]
    length: int = 0


class LeafStep(NamedTuple):
    """How to fold one shard once it is computed."""

    slot: int
    adds: bool  # add to the slot (it holds the left neighbour in the tree), or overwrite it
    merges: tuple[tuple[int, int], ...]  # then add the second slot to the first, in this order


class LocalPlan(NamedTuple):
    """How one worker folds the shards it holds."""

    pieces: tuple[Interval, ...]
    piece_slots: tuple[int, ...]
    steps: tuple[LeafStep, ...]  # for each shard held


@lru_cache(maxsize=1024)
def local_plan(num_leaves: int, held: Interval, num_shards: int | None = None) -> LocalPlan:
    """Fold complete subtrees as they finish, like carries of a binary counter; slots are reused.

    Each leaf is one shard; with ``num_shards`` a single leaf is held, which is the sum of that many.
    """
    if num_shards is not None:
        steps = [LeafStep(0, number > 0, ()) for number in range(num_shards)]
        return LocalPlan((held,), (0,), tuple(steps))
    free: list[int] = []
    used = 0
    steps = []
    piece_slots = []
    mine = pieces(num_leaves, held)
    for piece in mine:
        stack: list[int] = []
        for leaf in range(piece.lo, piece.hi):
            merges = merges_after(num_leaves, leaf, piece)
            if merges == 0:
                if not free:
                    free.append(used)
                    used += 1
                stack.append(free.pop())
                steps.append(LeafStep(stack[-1], False, ()))
                continue
            slot = stack[-1]
            pairs = []
            for _ in range(merges - 1):
                top = stack.pop()
                free.append(top)
                pairs.append((stack[-1], top))
            steps.append(LeafStep(slot, True, tuple(pairs)))
        piece_slots.append(stack[0])
    return LocalPlan(mine, tuple(piece_slots), tuple(steps))


class Slots:
    """Partial sums over shards of as many tensors as ``like``, one slot for each sum that is open at a time."""

    def __init__(self, like: Sequence[Tensor], *, bucket_bytes: int | None = None) -> None:
        self._like = like
        self.buckets = cut_into_buckets(like, bucket_bytes)
        self._slots: list[Slot] = []

    def reserve(self, plan: LocalPlan) -> None:
        """Allocate the slots that ``plan`` needs, and free those that it does not need."""
        needed = max([step.slot for step in plan.steps], default=0) + 1
        del self._slots[needed:]
        while len(self._slots) < needed:
            self._slots.append(self.new_slot())

    def fold(self, b: int, step: LeafStep, tensors: Mapping[int, Tensor]) -> None:
        """Fold the values that a shard has for the tensors of one bucket, by number; the others count as zeros."""
        slot = self._slots[step.slot]
        if not step.adds:
            for index in self.buckets[b].members:
                if index not in tensors:
                    slot.views[index].zero_()
        if tensors:
            views, values = [slot.views[index] for index in tensors], list(tensors.values())
            if step.adds:
                torch._foreach_add_(views, values)
            else:
                torch._foreach_copy_(views, values)
        self._merge(b, step)

    def fold_flat(self, b: int, step: LeafStep, flat: Tensor) -> None:
        """Fold the values that a shard has for all tensors of one bucket, laid out as the bucket is."""
        target = self._slots[step.slot].flats[b]
        if step.adds:
            target.add_(flat)
        else:
            target.copy_(flat)
        self._merge(b, step)

    def _merge(self, b: int, step: LeafStep) -> None:
        for left, right in step.merges:
            self._slots[left].flats[b].add_(self._slots[right].flats[b])

    def new_slot(self) -> "Slot":
        """Allocate further storage of the same layout."""
        return Slot(self.buckets, self._like)

    def partials(self, plan: LocalPlan) -> list[list[Tensor]]:
        """[bucket][piece]: the flat tensors that hold this worker's partial sums once they are pushed."""
        return [[self._slots[slot].flats[b] for slot in plan.piece_slots] for b in range(len(self.buckets))]

    @property
    def sums(self) -> list[Tensor]:
        """[bucket]: the flat tensors into which an exchange writes the sums."""
        return self._slots[0].flats

    @property
    def sum_views(self) -> list[Tensor]:
        """The sums, each with the shape of its tensor."""
        return self._slots[0].views


class Slot:
    """Storage for one value of each tensor, such as a partial sum."""

    def __init__(self, buckets: Sequence[Bucket], like: Sequence[Tensor]) -> None:
        self.flats = [torch.zeros(bucket.length, dtype=bucket.dtype, device=bucket.device) for bucket in buckets]
        views: dict[int, Tensor] = {}
        for bucket, flat in zip(buckets, self.flats, strict=True):
            for index, offset in zip(bucket.members, bucket.offsets, strict=True):
                views[index] = _view_like(like[index], flat[offset : offset + like[index].numel()])
        self.views = [views[index] for index in range(len(like))]


def _view_like(parameter: Tensor, flat: Tensor) -> Tensor:
    """View ``flat`` as a gradient that autograd makes: with the strides of a dense parameter, else in row-major order.

    Fused optimizers walk through the memory of a parameter and of its gradient alike, whatever their strides say.
    """
    if in_memory_order(parameter)[1].data_ptr() == parameter.data_ptr():
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def cut_into_buckets(parameters: Sequence[Tensor], bucket_bytes: int | None = None) -> list[Bucket]:
    """Cut parameters, last first (their gradients come first), into buckets of one dtype and device.

    Every parameter starts at a multiple of 64 bytes. A bucket is closed once it holds ``bucket_bytes``; None: as many
    as suits its device.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], Bucket] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        kind = (parameter.dtype, parameter.device)
        if kind not in open_buckets:
            open_buckets[kind] = Bucket(parameter.dtype, parameter.device, [], [])
            buckets.append(open_buckets[kind])
        bucket = open_buckets[kind]
        bucket.members.append(index)
        bucket.offsets.append(bucket.length)
        step = ALIGNMENT_BYTES // parameter.element_size()
        bucket.length += -(-parameter.numel() // step) * step
        enough = bucket_bytes or (BUCKET_BYTES if parameter.device.type == "cpu" else DEVICE_BUCKET_BYTES)
        if bucket.length * parameter.element_size() >= enough:
            del open_buckets[kind]
    return buckets
