"""The state of training on its way from a donor to a joiner: out of tensors and into tensors, without copies."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from resile_shared.errors import ResileError

from ..state.flat import Allocate
from .exchange import Tag
from .frames import (
    STATE_FRAME_BYTES,
    Frame,
    Kind,
    Malformed,
    decode_skeleton,
    encode,
    encode_skeleton,
)
from .link import Link, Place, Sink, Verdict
from .memory import bytes_of, flat_copy, is_flat_memory

_MAX_VIEWS = 256


class StateMismatch(ResileError):
    """The tensors made for a state do not have its size."""

    def __init__(self, peer: int, *, announced: int, allocated: int) -> None:
        super().__init__(f"worker {peer} hands over {announced} bytes of state, but there is room for {allocated}")
        self.peer = peer
        self.announced = announced
        self.allocated = allocated


def outgoing(generation: int, skeleton: bytes, tensors: Sequence[Tensor]) -> Iterator[tuple[bytes | memoryview, ...]]:
    """The frames of a state; memory that has to be copied first is copied one tensor at a time."""
    tag = Tag(generation, 0, 0)
    yield (encode_skeleton(tag, num_bytes=_num_bytes(tensors), skeleton=skeleton),)
    for number, views in enumerate(_chunks(tensors)):
        yield encode(Kind.STATE, tag, block=number, length=sum(map(len, views))), *views


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[memoryview]]:
    chunk: list[memoryview] = []
    room = STATE_FRAME_BYTES
    for tensor in tensors:
        memory = bytes_of(tensor if is_flat_memory(tensor) else flat_copy(tensor))
        while memory:
            chunk.append(memory[:room])
            memory = memory[room:]
            room -= len(chunk[-1])
            if not room or len(chunk) == _MAX_VIEWS:
                yield chunk
                chunk, room = [], STATE_FRAME_BYTES
    if chunk:
        yield chunk


class Arrival:
    """A state being received from one peer."""

    def __init__(self, peer: int, generation: int, num_bytes: int, tensors: Sequence[Tensor]) -> None:
        allocated = _num_bytes(tensors)
        if allocated != num_bytes:
            raise StateMismatch(peer, announced=num_bytes, allocated=allocated)
        self.generation = generation
        self._missing = num_bytes
        self._number = 0
        self._tensors = iter(tensors)
        self._room = memoryview(b"")
        self._copied: list[tuple[Tensor, Tensor]] = []

    @property
    def complete(self) -> bool:
        """Whether all tensors have their values."""
        return not self._missing

    def place(self, frame: Frame) -> Place:
        """The memory for the next bytes."""
        if frame.tag.generation != self.generation or frame.block != self._number or frame.length > self._missing:
            raise Malformed(f"state frame {frame.block} of generation {frame.tag.generation} is not what comes next")
        views: list[memoryview] = []
        wanted = frame.length
        while wanted:
            while not self._room:
                self._room = self._next_memory()
            views.append(self._room[:wanted])
            self._room = self._room[wanted:]
            wanted -= len(views[-1])
        return views, frame.length, partial(self._arrived, frame.length)

    def _arrived(self, num_bytes: int) -> None:
        self._number += 1
        self._missing -= num_bytes
        filled = self._copied[:-1] if self._room else self._copied[:]
        del self._copied[: len(filled)]
        with torch.no_grad():
            for tensor, copy in filled:
                tensor.copy_(copy)

    def _next_memory(self) -> memoryview:
        tensor = next(self._tensors)
        if is_flat_memory(tensor):
            return bytes_of(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._copied.append((tensor, copy))
        return bytes_of(copy)


class Reception:
    """A state awaited from whichever peer begins to send one."""

    def __init__(self, allocate: Allocate, *, newest: Tag | None, generation: int) -> None:
        self.allocate = allocate
        self.newest = newest
        """The newest round that this worker has begun."""
        self.generation = generation
        """Frames of older generations are stale."""
        self._inlets: dict[Link, Inlet] = {}

    @property
    def received(self) -> tuple[int, int] | None:
        """The peer whose state is there, and its generation."""
        for link, inlet in self._inlets.items():
            if inlet.arrival is not None and inlet.arrival.complete:
                return link.peer, inlet.arrival.generation
        return None

    @property
    def donors(self) -> list[Link]:
        """The link over which a state is coming, if one is."""
        return [link for link, inlet in self._inlets.items() if inlet.arrival is not None and not link.closed]

    def heard(self, links: Iterable[Link]) -> Iterable[Link]:
        """Those of ``links`` over which the state can come."""
        return self.donors or links

    def inlet(self, link: Link) -> "Inlet":
        """The sink for what ``link`` delivers."""
        if link not in self._inlets:
            self._inlets[link] = Inlet(self, link.peer)
        return self._inlets[link]

    def end(self) -> None:
        """Let go of the tensors."""
        for link in self._inlets:
            link.cut_short()


class Inlet(Sink):
    """What one link delivers while a state is awaited: rounds that have begun elsewhere stay parked."""

    def __init__(self, reception: Reception, peer: int) -> None:
        self.arrival: Arrival | None = None
        self._reception = reception
        self._peer = peer

    def place(self, frame: Frame) -> Place | Verdict:
        """See ``Sink``."""
        reception, arrival = self._reception, self.arrival
        if (arrival is not None and arrival.complete) or (arrival is None and reception.donors):
            return Verdict.PARK
        stale = frame.tag.generation < reception.generation
        if frame.kind is Kind.SKELETON and not stale:
            skeleton = bytearray(frame.length)
            return [memoryview(skeleton)], frame.length, partial(self._begin, skeleton, frame.tag.generation)
        if frame.kind is Kind.STATE and arrival is not None:
            return arrival.place(frame)
        # State without its beginning is the rest of a hand-over that was given up.
        if stale or frame.kind is Kind.STATE or (reception.newest is not None and frame.tag <= reception.newest):
            return Verdict.DISCARD
        return Verdict.PARK

    def _begin(self, skeleton: bytearray, generation: int) -> None:
        num_bytes, description = decode_skeleton(skeleton)
        self.arrival = Arrival(self._peer, generation, num_bytes, self._reception.allocate(description))
