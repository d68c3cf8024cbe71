"""Linked workers in one process, each blocking call in a thread of its own, and rounds whose result is known."""

import os
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from resile_learner.collectives.blocks import Sharing
from resile_learner.collectives.departure import LeaveAcknowledgement
from resile_learner.collectives.memory_agreement import MemoryAgreement
from resile_learner.collectives.poller import LinkPoller
from resile_learner.collectives.reduction import SharedMemory
from resile_learner.collectives.round import LinkRound, LinkRounds
from resile_learner.collectives.segments import Segment, create_segment, map_segment
from resile_learner.collectives.spec import Abandoned, RoundSpec, Tag
from resile_learner.collectives.state_transfer import StateTransfer
from resile_learner.collectives.transport import TcpTransport, Transport
from resile_learner.collectives.tree import Interval, children, pieces, ranges

T = TypeVar("T")
Pair = Callable[[], tuple[socket.socket, socket.socket]]
PATIENCE_SECONDS = 60  # how long a call may hang before a test gives up; no test waits for it to pass


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    return dialed, accepted


PAIRS: dict[str, Pair] = {"tcp": tcp_pair, "unix": socket.socketpair}


class SharedFromTheStart:
    """The segments of the workers on ``hosts``, of which each maps its host's others from the first round on.

    Their stages are small, so that a round uses each buffer many times. ``later`` are the hosts of rounds with an odd
    number: workers that map the others' segments late, so that groups grow. ``racks`` has the number of each worker's
    rack, or nothing, for rounds with an even and with an odd number; a host is in that of its first worker.
    """

    def __init__(
        self,
        hosts: Sequence[Collection[int]],
        later: Sequence[Collection[int]] | None = None,
        *,
        min_bytes: int = 1,
        stage_bytes: int = 1,
        owners: tuple[int, ...] = (),
        racks: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> None:
        self._sharing = Sharing(min_bytes=min_bytes, stage_bytes=stage_bytes, owners=owners)
        self._hosts = hosts, hosts if later is None else later
        self._racks = racks
        self._lock = threading.Lock()
        self._generation = -1
        self._made: dict[int, tuple[Segment, int]] = {}

    def memory(self, worker: int, spec: RoundSpec) -> SharedMemory:
        groups = [
            [rank for rank, member in enumerate(spec.members) if member in host]
            for host in self._hosts[spec.tag.round % 2]
        ]
        alone = [[rank] for rank in range(len(spec.members)) if not any(rank in group for group in groups)]
        racks = self._racks[spec.tag.round % 2]
        if all(len(group) < 2 for group in groups) and not racks:
            return SharedMemory(self._sharing)
        sharing = self._sharing._replace(groups=tuple(tuple(group) for group in groups + alone if group))
        if racks:
            rack_of = [racks[member] for member in spec.members]
            sharing = sharing._replace(
                racks=tuple(
                    tuple(rank for group in sharing.groups if rack_of[group[0]] == rack for rank in group)
                    for rack in dict.fromkeys(rack_of[group[0]] for group in sharing.groups)
                )
            )
        own = spec.members.index(worker)
        with self._lock:
            if spec.tag.generation > self._generation:
                self.close()
                self._generation = spec.tag.generation
                self._made = {member: create_segment(sharing.segment_bytes) for member in spec.members}
            made = {rank: self._made[spec.members[rank]] for rank in sharing.group_of(own)}
            segments = {
                rank: segment if rank == own else map_segment(fd, sharing.segment_bytes)
                for rank, (segment, fd) in made.items()
            }
        return SharedMemory(sharing, segments)

    def close(self) -> None:
        for _, fd in self._made.values():
            os.close(fd)
        self._made = {}


class AgreedMemory(MemoryAgreement):
    """An agreement that needs no rounds to be reached. A round that has failed is repeated in a newer generation."""

    def __init__(self, worker: int, shared: SharedFromTheStart) -> None:
        super().__init__(worker)
        self._shared = shared
        self._of: tuple[int, int, tuple[int, ...]] | None = None
        self._memory = SharedMemory()

    def begin(self, spec: RoundSpec) -> SharedMemory:
        super().begin(spec)
        if self._of != (spec.tag.generation, spec.tag.round % 2, spec.members):
            self._of = spec.tag.generation, spec.tag.round % 2, spec.members
            self._memory = self._shared.memory(self._worker, spec)
        return self._memory


class Node:
    """What one worker has: links, and the three things that it does over them."""

    def __init__(self, worker: int, agreement: MemoryAgreement | None = None) -> None:
        self.poller = LinkPoller()
        self.agreement = agreement
        self.exchange = LinkRounds(self.poller, worker, agreement)
        self.transfer = StateTransfer(self.poller, worker)
        self.leave = LeaveAcknowledgement(self.poller)

    def begin(self, spec: RoundSpec) -> LinkRound:
        return self.exchange.begin(spec)

    def run_round(self, spec: RoundSpec, header: bytes = b"") -> tuple[bytes, ...]:
        open_round = self.begin(spec)
        push_all(open_round, spec)
        return open_round.finish(header)


def push_all(open_round: LinkRound, spec: RoundSpec) -> None:
    for bucket in range(len(spec.sums)):
        open_round.push(bucket)


class Group:
    """Nodes, each linked to all others."""

    def __init__(
        self,
        num_nodes: int,
        pair: Pair = tcp_pair,
        transport: Callable[[socket.socket], Transport] = TcpTransport,
        *,
        agreement: Callable[[int], MemoryAgreement] = MemoryAgreement,
    ) -> None:
        self._pair = pair
        self._transport = transport
        self._agreement = agreement
        self.nodes = [self.make_node(worker) for worker in range(num_nodes)]
        for one, other in combinations(range(num_nodes), 2):
            self.connect(one, other)

    def make_node(self, worker: int) -> Node:
        return Node(worker, self._agreement(worker))

    def connect(self, one: int, other: int) -> None:
        here, there = self._pair()
        self.nodes[one].poller.add(other, self._transport(here))
        self.nodes[other].poller.add(one, self._transport(there))

    def stranger(self, *, member: int, worker: int) -> socket.socket:
        """The far end of a link that ``member`` takes for its link to ``worker``."""
        here, there = self._pair()
        there.settimeout(PATIENCE_SECONDS)
        self.nodes[member].poller.add(worker, self._transport(here))
        return there

    def kill(self, worker: int) -> None:
        self.nodes[worker].poller.close()
        self.nodes[worker] = self.make_node(worker)

    def close(self) -> None:
        for node in self.nodes:
            node.poller.close()
            if node.agreement is not None:
                node.agreement.close()


def sharing_group(num_nodes: int, *hosts: Collection[int]) -> Group:
    """A group over TCP in which the workers of each of ``hosts`` share memory."""
    shared = SharedFromTheStart([[worker for worker in host if worker < num_nodes] for host in hosts])
    return Group(num_nodes, agreement=lambda worker: AgreedMemory(worker, shared))


def start(call: Callable[[], T]) -> "Future[T]":
    """Run ``call`` in a thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait(futures: Sequence["Future[T]"]) -> list[T]:
    return [future.result(PATIENCE_SECONDS) for future in futures]


def abandoned(future: "Future[object]") -> Abandoned:
    error = future.exception(PATIENCE_SECONDS)
    assert isinstance(error, Abandoned), error
    return error


@dataclass(frozen=True)
class Work:
    """What a round sums: for each bucket the values of all leaves."""

    num_leaves: int
    leaves: Sequence[Sequence[Tensor]]
    _sums: dict[tuple[Interval, int], Tensor] = field(default_factory=dict)

    def sum_of(self, node: Interval, bucket: int) -> Tensor:
        """The sum over a subtree, by the definition of the tree."""
        if node.hi - node.lo == 1:
            return self.leaves[bucket][node.lo]
        if (node, bucket) not in self._sums:
            left, right = children(node)
            self._sums[node, bucket] = self.sum_of(left, bucket) + self.sum_of(right, bucket)
        return self._sums[node, bucket]

    def sums(self) -> list[Tensor]:
        return [self.sum_of(Interval(0, self.num_leaves), bucket) for bucket in range(len(self.leaves))]

    def spec(self, worker: int, members: Sequence[int], tag: Tag, *, in_place: bool = True) -> RoundSpec:
        held = tuple(pieces(self.num_leaves, range_) for range_ in ranges(self.num_leaves, len(members)))
        own = held[members.index(worker)]
        partials = [[self.sum_of(node, bucket).clone() for node in own] for bucket in range(len(self.leaves))]
        sums = [
            partial[0] if partial and in_place else torch.full_like(self.leaves[bucket][0], 77)
            for bucket, partial in enumerate(partials)
        ]
        return RoundSpec(tag, tuple(members), held, self.num_leaves, partials, sums)


def make_work(num_leaves: int, sizes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Work:
    generator = torch.Generator().manual_seed(seed)

    def values(size: int) -> Tensor:
        if dtype.is_floating_point:
            return (torch.randn(size, generator=generator, dtype=torch.float64) * 100).to(dtype)
        return torch.randint(-(2**40), 2**40, (size,), generator=generator).to(dtype)

    return Work(num_leaves, [[values(size) for _ in range(num_leaves)] for size in sizes])


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def same_values(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def check_round(group: Group, members: Sequence[int], tag: Tag, work: Work) -> None:
    """One round over ``members`` gives the tree's sums to each of them, bit for bit."""
    specs = {worker: work.spec(worker, members, tag) for worker in members}
    calls = [
        start(lambda worker=worker: group.nodes[worker].run_round(specs[worker], b"from %d" % worker))
        for worker in members
    ]
    expected_headers = tuple(b"from %d" % worker for worker in members)
    assert wait(calls) == [expected_headers] * len(members)
    for worker in members:
        for bucket, expected in enumerate(work.sums()):
            assert same_bits(specs[worker].sums[bucket], expected), f"bucket {bucket} of worker {worker}"
