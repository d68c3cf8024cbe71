"""How the changes of a buffer in the shards of a batch combine: as a script declares, or as library modules need it.

A shard's change is a tensor that is added to those of other shards or, for a maximum, compared with them, in the fixed
tree. What is no sum of numbers travels as integers, which are exact: the bits of the value that counts, or numbers in
the order of the values.
"""

import sys
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from resile_shared.errors import UsageError

from ..state.run import registered_buffers

KINDS = ("mean", "sum", "max", "min", "any", "first", "last", "concat")
MAXIMA = ("max", "min", "any")
_PLACED = ("first", "last", "concat")
_DECLARED = "_resile_buffers"
"""The attribute of a module that holds the rules of its buffers, by their keys."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Declared = str | tuple[str, float] | Callable[[Any], Tensor]


class Part(NamedTuple):
    """A shard, and its rows among those of the batch."""

    shard: int
    num_shards: int
    start: int
    stop: int
    num_rows: int

    @property
    def weight(self) -> float:
        """The share of the rows that is in the shard."""
        return (self.stop - self.start) / self.num_rows

    def counts(self, kind: str) -> bool:
        """Whether the shard's value counts by a rule of ``kind``."""
        return self.shard == {"first": 0, "last": self.num_shards - 1}.get(kind, self.shard)


class Rule(NamedTuple):
    """How a buffer combines. ``decay``: what a sum is first multiplied by; ``derive`` computes it from the module."""

    kind: str
    decay: float = 1.0
    derive: Callable[[Any], Tensor] | None = None
    is_assumed: bool = False
    """Whether nobody has said so."""

    @property
    def is_of_batch(self) -> bool:
        """Whether a shard leaves something that no other shard would."""
        return self.kind not in ("mean", "first")

    @property
    def is_maximum(self) -> bool:
        """Whether the greatest of the encoded values counts, and not their sum."""
        return self.kind in MAXIMA

    def like(self, buffer: Tensor) -> Tensor:
        """An encoded change of ``buffer`` that changes nothing, in the memory of one element."""
        if self.derive:
            return torch.empty(0, device=buffer.device)
        shape, dtype, neutral = buffer.shape, buffer.dtype, -0.0 if buffer.is_floating_point() else 0
        if self.kind in _PLACED:
            size = buffer.element_size() // (2 if buffer.is_complex() else 1)
            shape, dtype, neutral = torch.Size([*shape, 2]) if buffer.is_complex() else shape, _BITS[size], 0
        elif self.is_maximum:
            is_itself = _is_integer(buffer)
            dtype = dtype if is_itself else _BITS[buffer.element_size()]
            neutral = torch.iinfo(dtype).min
        if buffer.numel() == 1:  # strides of 0 would be kept where they mean nothing
            return torch.full(shape, neutral, dtype=dtype, device=buffer.device)
        return torch.full((), neutral, dtype=dtype, device=buffer.device).expand(shape)

    def change(self, now: Tensor, committed: Tensor, part: Part) -> Tensor:
        """Encode what a shard has changed; not of slots that are filled one after the other, see `Queue`."""
        if self.derive:
            return self.like(committed)
        if self.is_maximum:
            return _ordered(now, is_minimum=self.kind == "min").clone(memory_format=torch.contiguous_format)
        if self.kind in _PLACED:
            return _bits(now) - _bits(committed)
        if self.kind == "mean":
            return weighted_changes(now, committed, part.weight)
        return now - committed * self.decay if self.decay != 1 else weighted_changes(now, committed, 1.0)

    def apply(self, committed: Tensor, total: Tensor) -> None:
        """Write what all shards have changed, combined, into the committed value."""
        if self.is_maximum:
            _write_ordered(committed, total, is_minimum=self.kind == "min")
        elif self.kind in _PLACED:
            _bits(committed).add_(total)
        elif self.kind == "sum" and self.decay != 1:
            committed.mul_(self.decay).add_(total)
        else:
            committed.add_(total)


_OF_OBSERVERS = {"min_val": Rule("min"), "max_val": Rule("max")}
"""Also those of moving averages, which grow with the extremes of a batch."""


def add_changes(rule: Rule, left: Tensor, right: Tensor) -> Tensor:
    """One step of the tree, into ``left``."""
    return torch.maximum(left, right, out=left) if rule.is_maximum else left.add_(right)


def weighted_changes(now: Tensor, committed: Tensor, weight: float) -> Tensor:
    """Negative zeros where nothing has changed: adding them leaves any value as it is, even infinity and -0.0."""
    changes = now - committed
    if not now.is_floating_point():
        return changes if weight == 1 else changes.mul(weight)
    return changes.mul_(weight).masked_fill_(now == committed, -0.0)


class Queue(NamedTuple):
    """Slots of a module that shards fill one after the other, from where its pointer is: along the longest dimension.

    Shards fill as many slots for each of their rows. ``pointer`` and ``slots`` are numbers of buffers.
    """

    pointer: int
    slots: tuple[int, ...]
    length: int

    def num_filled(self, now: Tensor, committed: Tensor, *, has_changed: bool) -> int:
        """How many slots a shard has filled."""
        moved = (int(now) - int(committed)) % self.length
        return moved or (self.length if has_changed else 0)

    def offset(self, part: Part, filled: int, name: str) -> int:
        """How many slots the shards before fill. Raises UsageError."""
        rows = part.stop - part.start
        before, rest = divmod(filled * part.start, max(rows, 1))
        if rest or before + filled > self.length:
            raise UsageError(
                f"the buffer {name} has {self.length} slots, of which a shard with the rows {part.start} to "
                f'{part.stop} of {part.num_rows} has filled {filled}: with the rule "concat" each row fills as many, '
                "and a batch at most all of them"
            )
        return before

    def change(self, now: Tensor, committed: Tensor, *, begin: int, filled: int, offset: int, name: str) -> Tensor:
        """Encode the slots that a shard has filled, moved to where they belong. Raises UsageError."""
        dim = longest(committed)
        slots = torch.arange(begin, begin + filled, device=now.device)
        here, there = slots % self.length, (slots + offset) % self.length
        left, before = _bits(now), _bits(committed)
        elsewhere = (left - before).index_fill_(dim, here, 0)
        if bool(elsewhere.any()):
            raise UsageError(
                f'the buffer {name} has the rule "concat", and a shard has changed slots other than those from its '
                f"pointer on ({filled} from {begin}): fill these alone, along the longest dimension"
            )
        moved = torch.zeros_like(before, memory_format=torch.contiguous_format)
        return moved.index_copy_(dim, there, left.index_select(dim, here) - before.index_select(dim, there))


def buffers(model: nn.Module, /, **rules: Declared) -> None:
    r"""Declare how buffers of ``model`` combine that change when it is called: in its shards, and so in a batch.

    A rule has the name of buffers, or a pattern such as ``**{"encoder.*": "max"}``, and is one of

    - "mean": of all rows, as the running statistics of BatchNorm, which need no rule
    - "sum": what shards add; ("sum", 0.99): to what was there, times 0.99, as an exponential moving average of sums
    - "max", "min": the extremes of all shards; "any": a flag that one shard has set
    - "first", "last": the value that the first or the last shard leaves
    - "concat": slots that are filled one after the other along the longest dimension, as in a queue of keys, and the
      integer from which on they are: both have the rule
    - a function that computes the buffer from its module once the other buffers are those of the batch

    To be called before the training call. Raises UsageError.
    """
    places = list(registered_buffers(model))
    for pattern, declared in rules.items():
        kind, decay, derive = _parsed(pattern, declared)
        found = [each for each in places if fnmatchcase(each[0], pattern) or fnmatchcase(each[2], pattern)]
        if not found:
            raise UsageError(
                f"buffers() was given a rule for {pattern}, and the model has no such buffer: it has "
                f"{', '.join(name for name, _, _ in places) or 'none'}"
            )
        for name, module, key in found:
            _check(name, kind, decay, module._buffers[key])
            vars(module).setdefault(_DECLARED, {})[key] = Rule(kind, decay, derive)


def declaration(rules: Mapping[str, str]) -> str:
    """The call that declares ``rules`` of buffers, by their names, as text."""
    options = ", ".join(f'{name.rpartition(".")[2]}="{kind}"' for name, kind in rules.items())
    return f"resile.training.buffers(model, {options})"


def filled_slots(now: Tensor, before: Tensor) -> Tensor:
    """The numbers of the slots that have changed, along the longest dimension."""
    changed = now != before
    others = [dim for dim in range(changed.dim()) if dim != longest(changed)]
    return (changed.amax(others) if others else changed).nonzero().flatten()


def with_pointers(proposed: Mapping[str, str], integers: Collection[str]) -> dict[str, str]:
    """The ``proposed`` rules, in which a single integer beside slots that are filled is where they are filled next."""
    queues = {name.rpartition(".")[0] for name, kind in proposed.items() if kind == "concat"}
    return {
        name: "concat" if kind == "sum" and name in integers and name.rpartition(".")[0] in queues else kind
        for name, kind in proposed.items()
    }


def is_pointer(buffer: Tensor) -> bool:
    """Whether a buffer may say where slots are filled next."""
    return buffer.numel() == 1 and _is_integer(buffer)


def declared_rule(module: nn.Module, key: str) -> Rule | None:
    """The rule of a buffer that a script has declared."""
    declared: Rule | None = vars(module).get(_DECLARED, {}).get(key)
    return declared


def known_rule(module: nn.Module, key: str) -> Rule | None:
    """The rule of a buffer that is declared, or known since its module is a library's."""
    return declared_rule(module, key) or _of_library(module, key)


def _of_library(module: nn.Module, key: str) -> Rule | None:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return Rule("first") if key == "num_batches_tracked" else Rule("mean")
    if isinstance(module, nn.utils.parametrizations._SpectralNorm):
        return Rule("first")
    observers = sys.modules.get("torch.ao.quantization.observer")  # not imported for this
    if observers and isinstance(module, observers.UniformQuantizationObserverBase):
        return _OF_OBSERVERS.get(key)
    quantizers = sys.modules.get("torch.ao.quantization.fake_quantize")
    if quantizers and isinstance(module, quantizers.FakeQuantize) and key in ("scale", "zero_point"):
        place = ("scale", "zero_point").index(key)
        return Rule("derived", derive=lambda quantizer: quantizer.calculate_qparams()[place])
    return None


def queues(
    rules: list[Rule], places: list[tuple[nn.Module, str]], values: list[Tensor], names: list[str]
) -> list[Queue]:
    """Return the queues of all modules. Raises UsageError for slots without a pointer."""
    found = []
    of_module: dict[int, list[int]] = {}
    for index, ((module, _), rule) in enumerate(zip(places, rules, strict=True)):
        if rule.kind == "concat":
            of_module.setdefault(id(module), []).append(index)
    for members in of_module.values():
        pointers = [index for index in members if is_pointer(values[index])]
        slots = tuple(index for index in members if index not in pointers)
        lengths = {max(values[index].shape, default=0) for index in slots}
        if len(pointers) != 1 or len(lengths) != 1:
            raise UsageError(
                f'the buffers {", ".join(names[index] for index in members)} have the rule "concat": that needs slots '
                "of one number, and one integer in the same module, also with the rule, that says where they are "
                "filled next"
            )
        found.append(Queue(pointers[0], slots, lengths.pop()))
    return found


def _parsed(pattern: str, declared: Declared) -> tuple[str, float, Callable[[Any], Tensor] | None]:
    if callable(declared):
        return "derived", 1.0, declared
    kind, decay = declared if isinstance(declared, tuple) and len(declared) == 2 else (declared, 1.0)
    if kind not in KINDS or (decay != 1.0 and kind != "sum"):
        raise UsageError(
            f"buffers() was given {declared!r} for {pattern}: use one of {', '.join(KINDS)}, a sum with what it is "
            'first multiplied by, as in ("sum", 0.99), or a function of the module'
        )
    return str(kind), float(decay), None


def _check(name: str, kind: str, decay: float, buffer: Tensor | None) -> None:
    """Raise UsageError for a rule that the dtype of a buffer cannot have."""
    if buffer is None or kind in _PLACED or kind == "derived":
        return
    is_float = buffer.is_floating_point() and buffer.element_size() > 1
    fits = {
        "mean": is_float,
        "sum": is_float or (_is_integer(buffer) and decay == 1.0),
        "any": buffer.dtype is torch.bool,
    }
    if not fits.get(kind, is_float or _is_integer(buffer) or buffer.dtype is torch.bool):
        other = '"any"' if buffer.dtype is torch.bool else '"sum" or "first"'
        raise UsageError(f'the buffer {name} is of {buffer.dtype}, which the rule "{kind}" cannot have: use {other}')


def _is_integer(buffer: Tensor) -> bool:
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype is torch.bool)


def longest(buffer: Tensor) -> int:
    """The dimension of a buffer that has the most slots."""
    return max(range(buffer.dim()), key=lambda dim: buffer.shape[dim])


def _bits(buffer: Tensor) -> Tensor:
    """View a buffer as integers, whose differences and sums are exact."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return real.view(_BITS[real.element_size()])


def _ordered(buffer: Tensor, *, is_minimum: bool) -> Tensor:
    """Integers in the order of the values, or in the opposite one; NaN is the greatest, as in `torch.maximum`."""
    if buffer.is_floating_point():
        bits = _bits(torch.where(buffer.isnan(), torch.nan, buffer))
        order = torch.iinfo(bits.dtype)
        ordered = torch.where(bits < 0, bits ^ order.max, bits)
        if is_minimum:
            return torch.where(buffer.isnan(), order.max, ~ordered)
        return ordered
    bits = buffer.view(torch.uint8) if buffer.dtype is torch.bool else buffer
    return ~bits if is_minimum else bits


def _write_ordered(buffer: Tensor, ordered: Tensor, *, is_minimum: bool) -> None:
    """Write the values of which ``ordered`` are the integers."""
    if not buffer.is_floating_point():
        target = buffer.view(torch.uint8) if buffer.dtype is torch.bool else buffer
        target.copy_(~ordered if is_minimum else ordered)
        return
    order = torch.iinfo(ordered.dtype)
    values = ~ordered if is_minimum else ordered
    bits = torch.where(values < 0, values ^ order.max, values)
    found = bits.view(buffer.dtype)
    buffer.copy_(torch.where(ordered == order.max, torch.nan, found) if is_minimum else found)
