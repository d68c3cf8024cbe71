"""The training state on its way from a donor to a joiner: out of tensors and into tensors.

Tensors in memory of the host are sent and received without a copy, those on devices through pinned buffers.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from resile_shared.errors import ResileError

from ..state.flat import Allocate
from ..state.memory import ByteStream, byte_view, tensor_bytes
from ..state.pinned_copies import HostReader, HostWriter, StreamOf, side_stream
from .frames import (
    STATE_FRAME_BYTES,
    Announcement,
    Frame,
    Kind,
    Malformed,
    WorkerGroups,
    decode_skeleton,
    encode,
    encode_skeleton,
)
from .link import BrokenLink, Destination, Link, Refusal, Sink
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


class Origin(NamedTuple):
    """Where a state came from."""

    peer: int
    generation: int
    groups: WorkerGroups = ()
    """The workers that share memory at the beginning of this generation."""


class StateTransfer:
    """Sends the training state of ``worker`` to a peer, or receives that of a peer. For the main thread."""

    def __init__(self, poller: LinkPoller, worker: int, *, stream_of: StreamOf = side_stream) -> None:
        self._poller = poller
        self._worker = worker
        self._stream_of = stream_of

    def send(
        self,
        peer: int,
        generation: int,
        skeleton: bytes,
        tensors: Sequence[Tensor],
        *,
        groups: WorkerGroups = (),
        obsolete: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send the state of ``generation`` to ``peer``: its description, and the bytes of ``tensors`` in their order.

        ``groups``: the workers that share memory at the beginning of this generation.

        Raises Abandoned if the link is missing, breaks or is removed, or when ``obsolete()``, which is checked again
        after each ``LinkPoller.wake``.
        """
        link = self._poller.links.get(peer)
        if link is None:
            raise Abandoned(peer, "there is no link to it")
        reader = HostReader(STATE_FRAME_BYTES, self._stream_of)
        try:
            announced = encode_skeleton(
                Tag(generation, 0), num_bytes=_num_bytes(tensors), skeleton=skeleton, groups=groups
            )
            with closing(_frames(generation, announced, tensors, reader)) as frames:
                for frame in frames:
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
    ) -> Origin:
        """Wait for a state over any link and receive it into the tensors that ``allocate`` makes for its skeleton.

        Frames of rounds that this worker has not begun stay on their links, unless they are of an older generation than
        ``generation``. When a donor is lost half-way, another may send a state. Raises StateMismatch if the tensors
        have another size than the state; Abandoned when ``donor``, if it is given, is lost, or when ``obsolete()``,
        which is checked again after each ``LinkPoller.wake``.
        """
        poller = self._poller
        writer = HostWriter(STATE_FRAME_BYTES, self._stream_of)
        receiver = _StateReceiver(allocate, writer, newest=poller.newest_tag, generation=generation)

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


def _frames(
    generation: int, announced: bytes, tensors: Sequence[Tensor], reader: HostReader
) -> Generator[tuple[bytes | memoryview, ...], None, None]:
    """The frames of a state. One that carries tensors on devices must be sent before the next one is requested."""
    yield (announced,)
    tag = Tag(generation, 0)
    with closing(reader.read(_chunks(tensors))) as chunks:
        for number, chunk in enumerate(chunks):
            views = [tensor_bytes(piece) for piece in chunk]
            yield encode(Kind.STATE, tag, block=number, length=sum(map(len, views))), *views


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The bytes of ``tensors``, a frame at a time; those with gaps are copied first, one at a time."""
    chunk: list[Tensor] = []
    room = STATE_FRAME_BYTES
    for tensor in tensors:
        memory = byte_view(tensor if _is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().contiguous())
        while len(memory):
            chunk.append(memory[:room])
            memory = memory[room:]
            room -= len(chunk[-1])
            if not room or len(chunk) == _MAX_VIEWS:
                yield chunk
                chunk, room = [], STATE_FRAME_BYTES
    if chunk:
        yield chunk


def _is_plain(tensor: Tensor) -> bool:
    """Whether the elements lie in memory one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class _IncomingState:
    """A state that one peer has begun to send."""

    def __init__(
        self, peer: int, generation: int, announced: Announcement, tensors: Sequence[Tensor], writer: HostWriter
    ) -> None:
        allocated = _num_bytes(tensors)
        if allocated != announced.num_bytes:
            raise StateMismatch(peer, announced=announced.num_bytes, allocated=allocated)
        self.generation = generation
        self._writer = writer
        self.groups = announced.groups
        self._missing = announced.num_bytes
        self._next_block = 0
        plain = [t if _is_plain(t) else torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
        self._copies = [(tensor, copy) for tensor, copy in zip(tensors, plain, strict=True) if copy is not tensor]
        self._bytes = ByteStream(map(byte_view, plain))

    @property
    def is_complete(self) -> bool:
        """Whether all tensors have their values."""
        return not self._missing

    def accept(self, frame: Frame) -> Destination:
        """The memory for the next bytes."""
        if frame.tag.generation != self.generation or frame.block != self._next_block or frame.length > self._missing:
            raise Malformed(f"state frame {frame.block} of generation {frame.tag.generation} is not what comes next")
        start = self._bytes.num_bytes - self._missing
        memory = self._writer.allocate(self._bytes.cut(start, start + frame.length))
        return [tensor_bytes(piece) for piece in memory], frame.length, partial(self._on_frame, frame.length)

    @torch.no_grad()
    def _on_frame(self, num_bytes: int) -> None:
        self._writer.write()
        if num_bytes == self._missing:
            self._writer.finish()
            for tensor, copy in self._copies:
                tensor.copy_(copy)
        self._next_block += 1
        self._missing -= num_bytes


class _StateReceiver:
    """Waits for a state from the first peer that begins to send one."""

    def __init__(self, allocate: Allocate, writer: HostWriter, *, newest: Tag | None, generation: int) -> None:
        self.allocate = allocate
        self.writer = writer
        """One writer for all donors, so that what the first one sent is written before what the next one sends."""
        self.newest = newest
        """The newest round that this worker has begun."""
        self.generation = generation
        """The generation of the state, or an older one; frames of generations before it are stale."""
        self._sinks: dict[Link, StateSink] = {}

    @property
    def received(self) -> Origin | None:
        """Where the state that is complete came from."""
        for link, sink in self._sinks.items():
            if sink.incoming is not None and sink.incoming.is_complete:
                return Origin(link.peer, sink.incoming.generation, sink.incoming.groups)
        return None

    @property
    def donors(self) -> list[Link]:
        """The link over which a state is arriving, if there is one."""
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
        self.writer.finish()


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
        announced = decode_skeleton(skeleton)
        receiver = self._receiver
        tensors = receiver.allocate(announced.skeleton)
        self.incoming = _IncomingState(self._peer, generation, announced, tensors, receiver.writer)
