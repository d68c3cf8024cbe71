"""What each member tells all others in every round, beside its gradients."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from ..collectives.tree import Interval, children, fold_values
from .batches import Indices
from .buffers import Deltas, add_deltas
from .stragglers import Pace

_LENGTH = struct.Struct("<I")


@dataclass
class Partial:
    """This worker's sums over one complete subtree of shards: the small things that do not travel in buckets."""

    scalars: dict[str, float] = field(default_factory=dict)
    deltas: Deltas = field(default_factory=dict)


@dataclass
class Header:
    """One member's header."""

    named: int
    """The highest generation it has formed and may name."""
    digest: int
    """A rolling check of its parameters after the last commit."""
    indices: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The samples it really fetched for this round."""
    used: bytes = b""
    """For each trainable parameter, whether one of its shards gave it a gradient."""
    partials: Sequence[Partial] = ()
    """For each subtree it holds, left to right."""
    stored: Sequence[tuple[str, int, int, str]] = ()
    """Checkpoint parts it has stored since its last header: checkpoint, part, bytes, sha256."""
    saved: Sequence[str] = ()
    """Checkpoints whose manifest it has written since its last header."""
    dropped: Sequence[str] = ()
    """Checkpoints it has given up since its last header, for newer ones."""
    holds: Sequence[str] | None = None
    """After a recovery: the checkpoints under way of which it has a snapshot."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """In the first round: what must be equal on all members."""
    busy: bool = False
    """In the rounds at the end: whether this member waits for a checkpoint."""
    pause: bool = False
    """Whether this member was told to pause; one is enough."""
    checkpoint: bool = False
    """Whether this member's clock says that a checkpoint is due; the lowest rank's word counts."""
    pace: Pace | None = None
    """In an iteration: how long this member took for it."""

    def encode(self) -> bytes:
        """One JSON object with its length, then the raw arrays in order."""
        names = next((list(partial.scalars) for partial in self.partials if partial.scalars), [])
        scalars = np.array([[partial.scalars[name] for name in names] for partial in self.partials], dtype=np.float64)
        meta = {
            "named": self.named,
            "digest": self.digest,
            "indices": len(self.indices),
            "used": len(self.used),
            "names": names,
            "deltas": [list(partial.deltas) for partial in self.partials],
            "stored": self.stored,
            "saved": self.saved,
            "dropped": self.dropped,
            "holds": self.holds,
            "facts": dict(self.facts),
            "busy": self.busy,
            "pause": self.pause,
            "checkpoint": self.checkpoint,
            "pace": list(self.pace) if self.pace else None,
        }
        head = orjson.dumps(meta)
        raw = [_raw(delta) for partial in self.partials for delta in partial.deltas.values()]
        return b"".join([_LENGTH.pack(len(head)), head, self.indices.tobytes(), self.used, scalars.tobytes(), *raw])

    @staticmethod
    def decode(data: bytes, like: Callable[[int], Tensor]) -> "Header":
        """Read what `encode` wrote. ``like`` gives, for the number of a buffer, a tensor of its dtype and shape."""
        (length,) = _LENGTH.unpack_from(data)
        meta: dict[str, Any] = orjson.loads(data[_LENGTH.size : _LENGTH.size + length])
        cursor = _Cursor(data, _LENGTH.size + length)
        indices = np.frombuffer(cursor.take(8 * meta["indices"]), dtype=np.int64)
        used = cursor.take(meta["used"])
        names, touched = meta["names"], meta["deltas"]
        rows = np.frombuffer(cursor.take(8 * len(names) * len(touched)), dtype=np.float64).reshape(
            len(touched), len(names)
        )
        partials = [
            Partial(
                scalars=dict(zip(names, row.tolist(), strict=True)),
                deltas={index: cursor.tensor(like(index)) for index in numbers},
            )
            for row, numbers in zip(rows, touched, strict=True)
        ]
        return Header(
            named=meta["named"],
            digest=meta["digest"],
            indices=indices,
            used=used,
            partials=partials,
            stored=[(name, part, size, sha) for name, part, size, sha in meta["stored"]],
            saved=meta["saved"],
            dropped=meta["dropped"],
            holds=meta["holds"],
            facts=meta["facts"],
            busy=meta["busy"],
            pause=meta["pause"],
            checkpoint=meta["checkpoint"],
            pace=Pace(*meta["pace"]) if meta["pace"] else None,
        )


@dataclass(frozen=True)
class Totals:
    """What all headers of a round say together."""

    scalars: dict[str, float]
    deltas: Deltas
    used: list[bool]
    indices: Indices

    @staticmethod
    def of(headers: Sequence[Header], pieces: Sequence[Sequence[Interval]], num_leaves: int) -> "Totals":
        """Fold the headers' partial sums in the fixed tree; ``pieces[r]`` are the subtrees of rank r."""
        slots = [piece for held in pieces for piece in held]
        partials = [partial for header in headers for partial in header.partials]
        total = fold_values(num_leaves, slots, partials, add_partials) if partials else Partial()
        used = np.zeros(max(len(header.used) for header in headers), dtype=np.uint8)
        for header in headers:
            if header.used:
                used |= np.frombuffer(header.used, dtype=np.uint8)
        indices = np.concatenate([header.indices for header in headers])
        return Totals(total.scalars, total.deltas, used.astype(bool).tolist(), indices)


def add_partials(left: Partial, right: Partial) -> Partial:
    """One addition of the tree."""
    scalars = {name: value + right.scalars[name] for name, value in left.scalars.items()}
    return Partial(scalars, add_deltas(left.deltas, right.deltas))


def _raw(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class _Cursor:
    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._position = position

    def take(self, length: int) -> bytes:
        start, self._position = self._position, self._position + length
        return self._data[start : self._position]

    def tensor(self, like: Tensor) -> Tensor:
        raw = bytearray(self.take(like.numel() * like.element_size()))
        return torch.frombuffer(raw, dtype=like.dtype).view(like.shape) if raw else torch.empty_like(like, device="cpu")


def fold_leaves(piece: Interval, of_leaf: Callable[[int], Partial]) -> Partial:
    """Fold the partial sums of the single shards of one subtree."""
    if piece.hi - piece.lo == 1:
        return of_leaf(piece.lo)
    left, right = children(piece)
    return add_partials(fold_leaves(left, of_leaf), fold_leaves(right, of_leaf))
