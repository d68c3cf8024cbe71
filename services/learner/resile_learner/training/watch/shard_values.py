"""Refuses buffers that shards change differently, though nobody knows how that combines."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from resile_shared.errors import UsageError

from ..buffer_rules import KINDS, declaration, filled_slots, is_pointer, with_pointers
from ..digest import bits_of

Left = tuple[int | None, str]
"""A digest of what all shards have left in a buffer, None if they differ, and the rule that would suit it."""


class UnknownRule(UsageError):
    """Shards leave different values in a buffer, and nobody has said how these combine."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        names = ", ".join(rules)
        super().__init__(
            f"shards of the batch change the buffer {names} each by its own samples, and it is not known what that "
            f"makes for all of them: declare it before the training call, as in `{declaration(rules)}`. The rules are "
            f"{', '.join(KINDS)}, or a function of the module; they are documented at resile.training.buffers"
        )


class ShardValues:
    """What the shards of this worker have left in buffers with the ``names``, as far as the rule ``is_assumed``."""

    def __init__(self, names: Sequence[str], committed: Sequence[Tensor], is_assumed: Sequence[bool]) -> None:
        self._names = names
        self._committed = committed
        self._is_assumed = is_assumed
        self.left: dict[int, Left] = {}
        """By the numbers of the buffers that a shard has changed."""
        self._num_shards = 0

    def begin(self) -> None:
        """Begin with the first shard."""
        self.left = {}
        self._num_shards = 0

    def note(self, changed: Sequence[int], now: Callable[[int], Tensor], *, num_rows: int) -> None:
        """Note what a shard of ``num_rows`` has left, which has ``changed`` some buffers."""
        for index in self.left.keys() | changed:
            if self._is_assumed[index]:
                self._note(index, now(index), num_rows)
        self._num_shards += 1

    def _note(self, index: int, now: Tensor, num_rows: int) -> None:
        committed = self._committed[index]
        digest, unchanged = int(bits_of(now)), int(bits_of(committed))
        before, proposed = self.left.get(index, (unchanged if self._num_shards else digest, ""))
        counts = _counts(now, committed, num_rows)
        self.left[index] = (
            digest if digest == before and not counts else None,
            proposed or ("sum" if counts else _proposed(self._names[index], now, committed, num_rows)),
        )

    def check(self, left: Sequence[Mapping[int, Left]]) -> None:
        """Compare what the shards of the members that have any have left. Raises UnknownRule."""
        found = {}
        for index in sorted({index for each in left for index in each}):
            unchanged: Left = int(bits_of(self._committed[index])), ""
            given = [each.get(index, unchanged) for each in left]
            if len({digest for digest, _ in given}) > 1 or given[0][0] is None:
                found[self._names[index]] = next(proposed for _, proposed in given if proposed)
        if found:
            pointers = {name for name, each in zip(self._names, self._committed, strict=True) if is_pointer(each)}
            raise UnknownRule(with_pointers(found, pointers))


def _counts(now: Tensor, committed: Tensor, num_rows: int) -> bool:
    """Whether a buffer has changed by a multiple of the rows of a shard, as one that counts samples."""
    if num_rows < 2 or now.dtype is torch.bool or now.is_complex() or now.element_size() == 1:
        return False
    changes = now.double() - committed.double()
    return bool((changes.nan_to_num(0.5).remainder(num_rows) == 0).all()) and bool(changes.any())


def _proposed(name: str, now: Tensor, committed: Tensor, num_rows: int) -> str:
    """The rule that may suit a buffer without one, by what one shard has changed."""
    if now.dtype is torch.bool:
        return "any"
    if now.is_complex():
        return "last"
    changes = now.double() - committed.double()
    if changes.isfinite().all() and bool((changes == changes.round()).all()):
        return "sum"
    filled = filled_slots(now, committed) if now.dim() else changes.new_empty(0)
    is_contiguous = len(filled) > 0 and int(filled[-1] - filled[0]) + 1 == len(filled) < max(now.shape)
    if is_contiguous and len(filled) % max(num_rows, 1) == 0:
        return "concat"
    keeps = bool((changes == 0).any()) or not changes.isfinite().all()
    for kind, signs in (("max", changes >= 0), ("min", changes <= 0)):
        if (keeps or kind in name.rpartition(".")[2]) and bool(signs.all()):
            return kind
    return "mean"
