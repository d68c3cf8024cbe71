"""Buffers of a model (BatchNorm statistics and the like) under the fixed tree.

Every shard starts from the buffers of the last committed iteration. The changes that shards make to a floating-point
buffer are weighted and summed in the same tree as the gradients; any other buffer takes the value that the first shard
leaves in it. A buffer that a script replaced by one of another shape or dtype is a cache, which each worker fills for
itself: it is left alone.

Running statistics change in every shard, and no worker waits for a device to find that out: they travel in buckets, as
gradients do. Changes to other buffers, which are rare, travel in the headers.

PyTorch counts the writes to a tensor, except those through ``.data`` or numpy. Buffers are therefore compared by value
at some iterations, and in the first one in which this worker computes a shard: one that such a write has changed is
compared after every shard from then on.
"""

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from resile_shared.errors import UsageError

from ..state.memory import is_expanded
from ..state.run import registered_buffers
from .digest import RollingDigest
from .slots import LeafStep, LocalPlan, Slots

Deltas = dict[int, Tensor]


class Buffers:
    """The buffers of a model, numbered in the order of `registered_buffers`."""

    def __init__(self, model: nn.Module) -> None:
        registered = [place for place in registered_buffers(model) if place[1]._buffers[place[2]] is not None]
        self._names = [name for name, _, _ in registered]
        self._places = [(module, key) for _, module, key in registered]
        self._committed = [self._now(index).detach().clone() for index in range(len(self._places))]
        self._seen = [self._version(index) for index in range(len(self._places))]
        self._touched: set[int] = set()
        self._statistics = [index for index in range(len(self._places)) if self._is_statistic(index)]
        self._others = [index for index in range(len(self._places)) if index not in self._statistics]
        self._slots = Slots([self._committed[index] for index in self._statistics])
        self._base = self._slots.new_slot()
        """The committed running statistics."""
        self._left = self._slots.new_slot()
        """The running statistics that a shard leaves."""
        for index, view in zip(self._statistics, self._base.views, strict=True):
            self._committed[index] = view.copy_(self._committed[index])
        self._digest = RollingDigest(self._committed)
        self._compares_values = False
        self._has_collected = False
        """Whether this worker has computed a shard."""
        self._uncounted: set[int] = set()
        """The buffers that the script writes in a way that PyTorch does not count."""
        self._is_shard_open = False
        """Whether the model may have the running statistics of a shard, not the committed ones."""

    def _now(self, index: int) -> Tensor:
        module, key = self._places[index]
        buffer = module._buffers[key]
        assert buffer is not None
        return buffer

    def _is_statistic(self, index: int) -> bool:
        """Whether a buffer travels in buckets: of a dtype in which sums are possible, and writable as a whole."""
        buffer = self._now(index)
        return self._places[index][1].startswith("running_") and _is_summable(buffer) and not is_expanded(buffer)

    @property
    def has_statistics(self) -> bool:
        """Whether there are running statistics, and so `sums`."""
        return bool(self._statistics)

    def begin(self, plan: LocalPlan) -> None:
        """Begin an iteration in which this worker folds its shards by ``plan``."""
        self._slots.reserve(plan)

    def partials(self, plan: LocalPlan) -> list[list[Tensor]]:
        """[bucket][piece]: flat tensors with this worker's partial sums of running statistics, after its last shard."""
        return self._slots.partials(plan)

    @property
    def sums(self) -> list[Tensor]:
        """[bucket]: the flat tensors into which an exchange writes the sums for `commit`."""
        return self._slots.sums

    @torch.no_grad()
    def restore(self) -> None:
        """Before a shard: restore the committed values, also where they were changed after `collect`.

        Raises UsageError when a buffer is found to have changed before.
        """
        for index in self._changed_uncounted():
            raise UsageError(
                f"the buffer {self._names[index]} was written through .data or numpy, and no worker noticed it in time "
                "to exchange it: write to the buffer itself, under torch.no_grad(), as in buffer.copy_(value)"
            )
        self._touched.update(index for index in self._others if self._has_changed(index))
        for index in self._touched:
            self._write(index)
        self._note_versions(self._touched)
        self._touched.clear()
        _copy_all(*self._of_statistics())
        self._is_shard_open = False

    @torch.no_grad()
    def collect(self, *, weight: float, first: bool, step: LeafStep | None) -> Deltas:
        """After a shard: fold its weighted changes to running statistics by ``step``; None: they do not count.

        Returns its weighted changes to other buffers and, for the ``first`` shard, the values of those that are not
        floating-point.
        """
        self._is_shard_open = self._has_collected = True
        self._uncounted.update(self._changed_uncounted())
        if step and self._statistics:
            _copy_all(self._left.views, self._of_statistics()[0])
            for number, (now, committed) in enumerate(zip(self._left.flats, self._base.flats, strict=True)):
                self._slots.fold_flat(number, step, _weighted_changes(now, committed, weight))
        changed = [index for index in self._others if self._has_changed(index)]
        self._touched.update(changed)
        deltas = {}
        for index in changed:
            buffer = self._now(index)
            if buffer.is_floating_point():
                deltas[index] = _weighted_changes(buffer, self._committed[index], weight)
            elif first:
                deltas[index] = buffer.clone()
        return deltas

    def _has_changed(self, index: int) -> bool:
        if self._is_cache(index):
            return False
        now, committed = self._now(index), self._committed[index]
        tensor, version = self._seen[index]
        if now is tensor and now._version != version:
            return True
        may_have_changed = now is not tensor or index in self._uncounted
        return may_have_changed and not _are_same(now, committed)

    def _changed_uncounted(self) -> list[int]:
        """The buffers that the script has written uncounted, as far as this iteration compares values."""
        if not self._compares_values:
            return []
        unchanged = (index for index in self._others if not self._is_cache(index) and not self._has_changed(index))
        return [index for index in unchanged if not _are_same(self._now(index), self._committed[index])]

    def _write(self, index: int) -> None:
        """Write the committed value into the model."""
        now, committed = self._now(index), self._committed[index]
        if self._is_cache(index):
            return
        if is_expanded(now):
            module, key = self._places[index]
            module._buffers[key] = committed.clone()
        else:
            now.copy_(committed)

    def _is_cache(self, index: int) -> bool:
        now, committed = self._now(index), self._committed[index]
        return now.shape != committed.shape or now.dtype != committed.dtype

    def _version(self, index: int) -> tuple[Tensor, int]:
        """What tells whether a buffer was written, or replaced by assignment."""
        buffer = self._now(index)
        return buffer, buffer._version

    @torch.no_grad()
    def commit(self, deltas: Deltas) -> None:
        """After the exchange: apply the summed changes of all shards, those in `sums` and ``deltas``."""
        self.restore()
        if self._statistics:
            for flat, changes in zip(self._base.flats, self._slots.sums, strict=True):
                flat.add_(changes)
            _copy_all(*self._of_statistics())
        for index, delta in deltas.items():
            committed = self._committed[index]
            if committed.is_floating_point():
                self._check_finite(index, delta)
                committed.add_(delta.to(committed.device))
            else:
                committed.copy_(delta)
            self._write(index)
        self._note_versions(set(deltas))

    def _check_finite(self, index: int, delta: Tensor) -> None:
        """Raises UsageError when the sum of changes to a buffer is not finite because the buffer begins at infinity."""
        committed = self._committed[index]
        if bool((committed.isinf() & ~delta.isfinite()).any()):
            raise UsageError(
                f"the buffer {self._names[index]} is infinite where shards write other values, whose mean change is "
                "no number: begin with a finite value, or write it after the exchange by what is equal on all workers"
            )

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the model's current buffers the committed ones, after a state was loaded."""
        for index in range(len(self._places)):
            if not self._is_cache(index):
                self._committed[index].copy_(self._now(index))
        self._forget_shard()

    def begin_iteration(self, *, compares_values: bool) -> None:
        """Begin an iteration, before its first shard."""
        self._compares_values = compares_values or not self._has_collected
        self.adopt_changed()

    @torch.no_grad()
    def adopt_changed(self) -> None:
        """Commit what the script wrote into a buffer since the last exchange."""
        changed = {index for index in self._others if self._has_changed(index)} - self._touched
        for index in changed:
            self._committed[index].copy_(self._now(index))
        self._note_versions(changed)
        if not self._is_shard_open:
            now, committed = self._of_statistics()
            _copy_all(committed, now)

    def committed(self) -> list[Tensor]:
        """Copies of the committed values."""
        return [buffer.clone() for buffer in self._committed]

    @torch.no_grad()
    def reset(self, committed: list[Tensor]) -> None:
        """Undo what was committed since `committed` returned these values."""
        for index, value in enumerate(committed):
            self._committed[index].copy_(value)
            if index in self._others:
                self._write(index)
        _copy_all(*self._of_statistics())
        self._forget_shard()

    def digest(self, number: int) -> int:
        """A cheap check of the committed values before iteration ``number``: see `RollingDigest`."""
        return self._digest.at(number)

    def like(self, index: int) -> Tensor:
        """A buffer of the dtype and shape of buffer ``index``."""
        return self._committed[index]

    def _of_statistics(self) -> tuple[list[Tensor], list[Tensor]]:
        """The running statistics: those of the model, and the committed ones."""
        now = [self._now(index) for index in self._statistics]
        return now, [self._committed[index] for index in self._statistics]

    def _forget_shard(self) -> None:
        self._touched.clear()
        self._note_versions(set(range(len(self._places))))
        self._is_shard_open = False

    def _note_versions(self, indices: set[int]) -> None:
        for index in indices:
            self._seen[index] = self._version(index)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy running statistics. Graphs of other shards may refer to them, but use no value that a shard changes."""
    if targets:
        with _unsafe_preserve_version_counter(tuple(targets)):
            torch._foreach_copy_(targets, sources)


def _weighted_changes(now: Tensor, committed: Tensor, weight: float) -> Tensor:
    """Negative zeros where nothing has changed: adding them leaves any value as it is, even infinity and -0.0."""
    return (now - committed).mul_(weight).masked_fill_(now == committed, -0.0)


def _is_summable(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and buffer.element_size() >= 2  # not those of 8 bits


def _are_same(left: Tensor, right: Tensor) -> bool:
    """Whether two buffers of one shape and dtype have equal values, or NaN in both, everywhere."""
    if left.is_floating_point() and left.element_size() == 1:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


def add_deltas(left: Deltas, right: Deltas) -> Deltas:
    """One addition of the tree; a buffer that one side did not change adds nothing."""
    merged = dict(left)
    for index, delta in right.items():
        if index in merged and delta.is_floating_point():
            merged[index] = merged[index] + delta
        else:
            merged.setdefault(index, delta)
    return merged
