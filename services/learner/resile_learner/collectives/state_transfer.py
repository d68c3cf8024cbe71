"""The training state on its way from a donor to a joiner: out of tensors and into tensors, without copies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from resile_shared.errors import ResileError

from ..state.flat import Allocate
from ..state.memory import tensor_bytes
from .frames import (
    STATE_FRAME_BYTES,
    Frame,
    Kind,
    Malformed,
    decode_skeleton,
    encode,
    encode_skeleton,
)
from .link import BrokenLink, Destination, Link, Refusal, Sink
from .memory import flat_copy, is_flat_memory
from .poller import LinkPoller
from .spec import Abandoned, Tag

_MAX_VIEWS = 256


class StateMismatch(ResileError):
    """The tensors allocated for a state do not have its size."""

    def __init__(self, peer: int, *, announced: int, allocated: int) -> None:
        super().__init__(f"worker {peer} sends {announced} bytes of state, but {allocated} bytes are allocated for it")
        self.peer = peer
        self.announced = announced
        self.allocated = allocated


class StateTransfer:
    """Sends the training state of ``worker`` to a peer, or receives that of a peer. For the main thread."""

    def __init__(self, poller: LinkPoller, worker: int) -> None:
        self._poller = poller
        self._worker = worker

    def send(
        self,
        peer: int,
        generation: int,
        skeleton: bytes,
        tensors: Sequence[Tensor],
        *,
        obsolete: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send the state of ``generation`` to ``peer``: its description, and the bytes of ``tensors`` in their order.

        Raises Abandoned if the link is missing, breaks or is removed, or when ``obsolete()``, which is checked again
        after each ``LinkPoller.wake``.
        """
        link = self._poller.links.get(peer)
        if link is None:
            raise Abandoned(peer, "there is no link to it")
        try:
            for frame in _frames(generation, skeleton, tensors):
                link.send(*frame)
                link.flush()
                self._poller.serve(tuple, _no_sink, lambda: not link.pending or link.closed or obsolete())
                if link.closed:
                    raise Abandoned(peer, "its link was lost while state was sent to it")
                if link.pending:
                    raise Abandoned(peer, "the state that was sent to it is obsolete")
        except BrokenLink as broken:
            self._poller.drop(link)
            raise Abandoned(peer, broken.reason) from broken
        finally:
            link.drop_buffers()

    def receive(
        self,
        allocate: Allocate,
        *,
        generation: int = 0,
        donor: int | None = None,
        obsolete: Callable[[], bool] = lambda: False,
    ) -> tuple[int, int]:
        """Wait for a state over any link and receive it into the tensors that ``allocate`` makes for its skeleton.

        Returns the peer that sent it and its generation. Frames of rounds that this worker has not begun stay on their
        links, unless they are of an older generation than ``generation``. When a donor is lost half-way, another may
        send a state. Raises StateMismatch if the tensors have another size than the state; Abandoned when ``donor``,
        if it is given, is lost, or when ``obsolete()``, which is checked again after each ``LinkPoller.wake``.
        """
        poller = self._poller
        receiver = _StateReceiver(allocate, newest=poller.newest_tag, generation=generation)

        def has_ended() -> bool:
            if receiver.received is not None:
                return True
            if donor is not None and donor not in poller.links:
                raise Abandoned(donor, "its link was lost while it sent its state")
            return obsolete()

        try:
            poller.serve(lambda: receiver.donors or poller.links.values(), receiver.sink, has_ended)
            if receiver.received is None:
                raise Abandoned(self._worker if donor is None else donor, "its state is obsolete")
            return receiver.received
        finally:
            receiver.drop_buffers()


def _no_sink(link: Link) -> NoReturn:
    raise AssertionError(f"nothing is received from worker {link.peer}")


def _frames(generation: int, skeleton: bytes, tensors: Sequence[Tensor]) -> Iterator[tuple[bytes | memoryview, ...]]:
    """The frames of a state; memory that has to be copied first is copied one tensor at a time."""
    tag = Tag(generation, 0)
    yield (encode_skeleton(tag, num_bytes=_num_bytes(tensors), skeleton=skeleton),)
    for number, views in enumerate(_chunks(tensors)):
        yield encode(Kind.STATE, tag, block=number, length=sum(map(len, views))), *views


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[memoryview]]:
    chunk: list[memoryview] = []
    room = STATE_FRAME_BYTES
    for tensor in tensors:
        memory = tensor_bytes(tensor if is_flat_memory(tensor) else flat_copy(tensor))
        while memory:
            chunk.append(memory[:room])
            memory = memory[room:]
            room -= len(chunk[-1])
            if not room or len(chunk) == _MAX_VIEWS:
                yield chunk
                chunk, room = [], STATE_FRAME_BYTES
    if chunk:
        yield chunk


class _IncomingState:
    """A state that one peer has begun to send."""

    def __init__(self, peer: int, generation: int, num_bytes: int, tensors: Sequence[Tensor]) -> None:
        allocated = _num_bytes(tensors)
        if allocated != num_bytes:
            raise StateMismatch(peer, announced=num_bytes, allocated=allocated)
        self.generation = generation
        self._missing = num_bytes
        self._next_block = 0
        self._tensors = iter(tensors)
        self._memory = memoryview(b"")
        self._copies: list[tuple[Tensor, Tensor]] = []

    @property
    def is_complete(self) -> bool:
        """Whether all tensors have their values."""
        return not self._missing

    def accept(self, frame: Frame) -> Destination:
        """The memory for the next bytes."""
        if frame.tag.generation != self.generation or frame.block != self._next_block or frame.length > self._missing:
            raise Malformed(f"state frame {frame.block} of generation {frame.tag.generation} is not what comes next")
        views: list[memoryview] = []
        wanted = frame.length
        while wanted:
            while not self._memory:
                self._memory = self._next_memory()
            views.append(self._memory[:wanted])
            self._memory = self._memory[wanted:]
            wanted -= len(views[-1])
        return views, frame.length, partial(self._on_frame, frame.length)

    def _on_frame(self, num_bytes: int) -> None:
        self._next_block += 1
        self._missing -= num_bytes
        filled = self._copies[:-1] if self._memory else self._copies[:]
        del self._copies[: len(filled)]
        with torch.no_grad():
            for tensor, copy in filled:
                tensor.copy_(copy)

    def _next_memory(self) -> memoryview:
        tensor = next(self._tensors)
        if is_flat_memory(tensor):
            return tensor_bytes(tensor)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._copies.append((tensor, copy))
        return tensor_bytes(copy)


class _StateReceiver:
    """Waits for a state from the first peer that begins to send one."""

    def __init__(self, allocate: Allocate, *, newest: Tag | None, generation: int) -> None:
        self.allocate = allocate
        self.newest = newest
        """The newest round that this worker has begun."""
        self.generation = generation
        """Frames of older generations are stale."""
        self._sinks: dict[Link, StateSink] = {}

    @property
    def received(self) -> tuple[int, int] | None:
        """The peer whose state is complete, and its generation."""
        for link, sink in self._sinks.items():
            if sink.incoming is not None and sink.incoming.is_complete:
                return link.peer, sink.incoming.generation
        return None

    @property
    def donors(self) -> list[Link]:
        """The link over which a state is coming, if there is one."""
        return [link for link, sink in self._sinks.items() if sink.incoming is not None and not link.closed]

    def sink(self, link: Link) -> "StateSink":
        """The sink for the frames of ``link``."""
        if link not in self._sinks:
            self._sinks[link] = StateSink(self, link.peer)
        return self._sinks[link]

    def drop_buffers(self) -> None:
        """Release the tensors."""
        for link in self._sinks:
            link.drop_buffers()


class StateSink(Sink):
    """Receives the state that one link delivers; frames of rounds that have begun elsewhere are deferred."""

    def __init__(self, receiver: _StateReceiver, peer: int) -> None:
        self.incoming: _IncomingState | None = None
        self._receiver = receiver
        self._peer = peer

    def accept(self, frame: Frame) -> Destination | Refusal:
        """See ``Sink``."""
        receiver, incoming = self._receiver, self.incoming
        if (incoming is not None and incoming.is_complete) or (incoming is None and receiver.donors):
            return Refusal.DEFER
        is_stale = frame.tag.generation < receiver.generation
        if frame.kind is Kind.SKELETON and not is_stale:
            skeleton = bytearray(frame.length)
            return [memoryview(skeleton)], frame.length, partial(self._begin, skeleton, frame.tag.generation)
        if frame.kind is Kind.STATE and incoming is not None:
            return incoming.accept(frame)
        # State without its skeleton is the rest of a transfer that was abandoned.
        if is_stale or frame.kind is Kind.STATE or (receiver.newest is not None and frame.tag <= receiver.newest):
            return Refusal.DISCARD
        return Refusal.DEFER

    def _begin(self, skeleton: bytearray, generation: int) -> None:
        num_bytes, description = decode_skeleton(skeleton)
        self.incoming = _IncomingState(self._peer, generation, num_bytes, self._receiver.allocate(description))
