"""Buffers of a model (BatchNorm statistics and the like) under the fixed tree.

Every shard starts from the buffers of the last committed iteration. What shards change combines in the same tree as the
gradients, by the rule of each buffer (`buffer_rules.py`). Where nobody knows the rule, all shards must leave the same;
in a loop whose body runs for each batch, changes to a floating-point buffer are then weighted and summed. A buffer that
a script replaced by one of another shape or dtype is a cache, which each worker fills for itself: it is left alone.

Running statistics change in every shard, and no worker waits for a device to find that out: they travel in buckets, as
gradients do. Changes to other buffers, which are rare, travel in the headers as long as they are small. The headers
name larger ones, which travel in the buckets of a round that follows.

PyTorch counts the writes to a tensor, except those through ``.data`` or numpy. Buffers are therefore compared by value
at some iterations, and in the first one in which this worker computes a shard: one that such a write has changed is
compared after every shard from then on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from resile_shared.errors import UsageError

from ..state.memory import is_expanded
from ..state.run import registered_buffers
from .buffer_rules import (
    Part,
    Queue,
    Rule,
    add_changes,
    declaration,
    declared_rule,
    known_rule,
    queues,
    weighted_changes,
)
from .digest import RollingDigest
from .slots import LeafStep, LocalPlan, Slots
from .watch.shard_values import ShardValues

Deltas = dict[int, Tensor]
"""Encoded changes, by the numbers of the buffers. Those in a header are on the CPU."""
MAX_SENT_BYTES = 1 << 18
"""The maximum size of all changes in a header, for each subtree of shards."""


class Buffers:
    """The buffers of a model, numbered in the order of `registered_buffers`.

    ``combines_alike``: buffers without a rule must be the same in all shards, also those of floats.
    """

    def __init__(self, model: nn.Module, *, combines_alike: bool = False) -> None:
        registered = [place for place in registered_buffers(model) if place[1]._buffers[place[2]] is not None]
        self._names = [name for name, _, _ in registered]
        self._places = [(module, key) for _, module, key in registered]
        self._committed = [self._now(index).detach().clone() for index in range(len(self._places))]
        self._seen = [self._version(index) for index in range(len(self._places))]
        self._touched: set[int] = set()
        self.rules = [self._rule(index, combines_alike=combines_alike) for index in range(len(self._places))]
        self._queues = {index: queue for queue in self._find_queues() for index in (queue.pointer, *queue.slots)}
        self._expected: dict[int, int] = {}
        """How many slots of each queue all shards fill, by those that were computed here."""
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
        self._like = [
            Rule("sum").like(value) if self._is_pointer(index) else rule.like(value)
            for index, (rule, value) in enumerate(zip(self.rules, self._committed, strict=True))
        ]
        self._is_late = self._find_late()
        self._slots_of_others: dict[int, Deltas] = {}
        """The changes to other buffers, added up so far, by the slots of the plan."""
        self.values = ShardValues(self._names, self._committed, [rule.is_assumed for rule in self.rules])
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
        is_mean = self.rules[index].kind == "mean" and self._places[index][1].startswith("running_")
        return is_mean and _is_summable(buffer) and not is_expanded(buffer)

    def _rule(self, index: int, *, combines_alike: bool) -> Rule:
        module, key = self._places[index]
        buffer = self._now(index)
        if rule := known_rule(module, key):
            return rule
        if key.startswith("running_") and _is_summable(buffer):
            return Rule("mean")
        if combines_alike or not _is_summable(buffer):
            return Rule("first", is_assumed=True)
        return Rule("mean")

    def _find_queues(self) -> list[Queue]:
        return queues(self.rules, self._places, self._committed, self._names)

    def _is_pointer(self, index: int) -> bool:
        return index in self._queues and self._queues[index].pointer == index

    def _find_late(self) -> list[bool]:
        """Which of the others travel in a round that follows: all but the smallest, which fit into a header."""
        num_bytes, are_late = 0, [False] * len(self._places)
        for index in sorted(self._others, key=lambda index: self._like[index].nbytes):
            num_bytes += self._like[index].nbytes
            are_late[index] = num_bytes > MAX_SENT_BYTES
        return are_late

    @property
    def has_statistics(self) -> bool:
        """Whether there are running statistics, and so `sums`."""
        return bool(self._statistics)

    def begin(self, plan: LocalPlan) -> None:
        """Begin an iteration in which this worker folds its shards by ``plan``."""
        self._slots.reserve(plan)
        self._slots_of_others.clear()
        self._expected.clear()
        self.values.begin()

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
    def collect(self, part: Part, step: LeafStep | None, *, folds_statistics: bool = True) -> None:
        """After a shard: fold what it has changed by ``step``; None: it does not count."""
        self._is_shard_open = self._has_collected = True
        self._uncounted.update(self._changed_uncounted())
        if step and self._statistics and folds_statistics:
            _copy_all(self._left.views, self._of_statistics()[0])
            for number, (now, committed) in enumerate(zip(self._left.flats, self._base.flats, strict=True)):
                self._slots.fold_flat(number, step, weighted_changes(now, committed, part.weight))
        changed = [index for index in self._others if self._has_changed(index)]
        self._touched.update(changed)
        if step and self._others:
            self.values.note(changed, self._now, num_rows=part.stop - part.start)
            self._fold_others(step, self._changes(changed, part))

    def _changes(self, changed: Sequence[int], part: Part) -> Deltas:
        """Encode what a shard has ``changed``, as far as it counts."""
        found: Deltas = {}
        for index in changed:
            rule = self.rules[index]
            if index in self._queues:
                found |= self._filled(self._queues[index], part) if index not in found else {}
            elif part.counts(rule.kind):
                found[index] = rule.change(self._now(index), self._committed[index], part)
        return found

    def _filled(self, queue: Queue, part: Part) -> Deltas:
        """Encode which slots of a queue a shard has filled, and with what."""
        pointer, name = queue.pointer, self._names[queue.slots[0]]
        has_changed = any(self._has_changed(index) for index in queue.slots)
        begin = int(self._committed[pointer])
        filled = queue.num_filled(self._now(pointer), self._committed[pointer], has_changed=has_changed)
        offset = queue.offset(part, filled, name)
        self._expected[pointer] = filled * part.num_rows // max(part.stop - part.start, 1)
        found = {pointer: torch.full_like(self._committed[pointer], filled)}
        for index in queue.slots:
            now, committed = self._now(index), self._committed[index]
            found[index] = queue.change(
                now, committed, begin=begin, filled=filled, offset=offset, name=self._names[index]
            )
        return found

    def _fold_others(self, step: LeafStep, changes: Deltas) -> None:
        slots = self._slots_of_others
        slots[step.slot] = self.add(slots[step.slot], changes) if step.adds else changes
        for left, right in step.merges:
            slots[left] = self.add(slots[left], slots[right])

    def add(self, left: Deltas, right: Deltas) -> Deltas:
        """One addition of the tree, into ``left``; a buffer that one side did not change adds nothing."""
        for index, change in right.items():
            left[index] = add_changes(self.rules[index], left[index], change) if index in left else change
        return left

    def changes(self, plan: LocalPlan) -> list[Deltas]:
        """[piece]: this worker's changes to buffers that travel in headers, after its last shard."""
        return [
            {index: change for index, change in self._slots_of_others.get(slot, {}).items() if not self._is_late[index]}
            for slot in plan.piece_slots
        ]

    @property
    def late(self) -> list[int]:
        """The buffers that this worker's shards have changed, and whose changes are too large for a header."""
        return sorted({index for each in self._slots_of_others.values() for index in each if self._is_late[index]})

    @property
    def declared(self) -> dict[str, tuple[nn.Module, str]]:
        """Buffers that a script has declared to be other in the batch than in any shard: their modules and keys."""
        return {
            name: place
            for name, place in zip(self._names, self._places, strict=True)
            if (rule := declared_rule(*place)) and rule.is_of_batch
        }

    def late_sums(self, late: Sequence[int], plan: LocalPlan) -> "LateSums":
        """What a round takes that combines the changes to the buffers ``late``: on their device, if they have one."""
        devices = {self._like[index].device for index in late}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        partials = []
        for index in late:
            changes = [self._slots_of_others[slot].get(index) for slot in plan.piece_slots]
            given = [self._like[index].clone() if each is None else each for each in changes]
            partials.append([each.reshape(-1).to(device) for each in given])
        sums = [self._like[index].to(device).contiguous().clone() for index in late]
        maxima = frozenset(number for number, index in enumerate(late) if self.rules[index].is_maximum)
        return LateSums(partials, [each.view(-1) for each in sums], maxima, dict(zip(late, sums, strict=True)))

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
        for index, change in deltas.items():
            self._apply(index, change.to(self._committed[index].device))
            self._write(index)
        derived = {index for index in deltas if self.rules[index].derive}
        for index in derived:
            self._committed[index].copy_(self.rules[index].derive(self._places[index][0]))  # type: ignore[misc]
            self._write(index)
        self._note_versions(set(deltas))

    def _apply(self, index: int, change: Tensor) -> None:
        committed, rule = self._committed[index], self.rules[index]
        if self._is_pointer(index):
            filled, queue = int(change), self._queues[index]
            if self._expected.get(index, filled) != filled:
                raise UsageError(
                    f"the shards of a batch have filled {filled} slots of {self._names[queue.slots[0]]} together, and "
                    'not each the same number for each row, which the rule "concat" needs'
                )
            committed.copy_((committed + filled) % queue.length)
        elif not rule.derive:
            if rule.kind in ("mean", "sum"):
                self._check_finite(index, change)
            rule.apply(committed, change)

    def _check_finite(self, index: int, delta: Tensor) -> None:
        """Raises UsageError when the sum of changes to a buffer is not finite because the buffer begins at infinity."""
        committed = self._committed[index]
        extremes = declaration({self._names[index]: "max" if bool((committed == -torch.inf).any()) else "min"})
        if committed.is_floating_point() and bool((committed.isinf() & ~delta.isfinite()).any()):
            raise UsageError(
                f"the buffer {self._names[index]} is infinite where shards write other values, whose mean change is "
                f"no number: begin with a finite value, or declare that it is the extreme of all shards: `{extremes}`"
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
        """A change of buffer ``index`` that changes nothing."""
        return self._like[index]

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


def _is_summable(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and buffer.element_size() >= 2  # not those of 8 bits


def _are_same(left: Tensor, right: Tensor) -> bool:
    """Whether two buffers of one shape and dtype have equal values, or NaN in both, everywhere."""
    if left.is_floating_point() and left.element_size() == 1:
        left, right = left.view(torch.uint8), right.view(torch.uint8)
    return torch.equal(left, right) or bool(((left == right) | ((left != left) & (right != right))).all())


class LateSums(NamedTuple):
    """What a round takes: see `Rounds.open`; and the sums, with their shapes, by the numbers of the buffers."""

    partials: list[list[Tensor]]
    sums: list[Tensor]
    maxima: frozenset[int]
    changes: Deltas
