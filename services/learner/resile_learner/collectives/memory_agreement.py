"""Which members of a generation share memory: they find out in the headers of its first rounds.

Every header of a round begins with a status. It says on which host a member is, where it receives descriptors, which
segment it has made for this generation, and whose segments it has mapped. All members have all statuses when a round is
complete, and so all know who shares memory: those are a group of whom each has said that it has mapped the others'
segments. The status of one round names the segments, that of the next one says they are mapped, and the round after
that uses them. A group grows if somebody maps the segments late.

Segments belong to one membership of one generation, and to its rounds up to the first that fails. A member that was
left behind keeps reading the segments of its own generation, which nobody writes to any more, and it can write to no
segment but its own. Where memory cannot be shared, the connections carry everything, and the reason is reported.
"""

import hashlib
import os
import secrets
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median_high, median_low
from typing import NamedTuple

from .blocks import DIRECT_BYTES, MIN_SHARED_BYTES, Sharing
from .reduction import SharedMemory
from .segments import NAME_BYTES, TOKEN_BYTES, Mailbox, Segment, create_segment, map_segment
from .spec import RoundSpec
from .transport import Traffic

HOP_SECONDS = 0.004
"""What two more hops inside a host may take: a bucket is folded by group if the link takes longer for it."""
MEASURED_BYTES = 4 << 20
"""What a member sends to other hosts before it knows the rate of its links."""
SLOW_PART = 3
"""A host is slow if its links carry less than this part of what those of the median host do: see `_owners`."""
_RATE_BITS = 3
"""Of a rate, that are sent after their number: it is known to one part in eight."""
_STATUS = struct.Struct(f"<8s8s{NAME_BYTES}s{TOKEN_BYTES}sB")
_NOTHING = bytes(NAME_BYTES)
Key = tuple[int, tuple[int, ...]]
Groups = tuple[tuple[int, ...], ...]


class Host(NamedTuple):
    """Where a process runs: those with the same kernel and network namespace can pass each other descriptors."""

    kernel: bytes
    network: bytes


NOWHERE = Host(bytes(8), bytes(8))


def find_host() -> Host:
    """Return where this process runs; `NOWHERE` if the system does not say."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return NOWHERE
    return Host(_digest(kernel), _digest(b"%d %d" % (network.st_dev, network.st_ino)))


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()[:8]


class Status(NamedTuple):
    """What a member says about itself in every header."""

    host: Host
    name: bytes
    """Of its mailbox; zeros while it has none."""
    token: bytes
    """Of its segment; zeros while it has none."""
    mapped: frozenset[int]
    """The ranks whose segments it has mapped."""
    rate: int = 0
    """The bytes a second that its links to other hosts carry; 0 if not known."""

    def encode(self, num_ranks: int) -> bytes:
        """As bytes, whose number depends on ``num_ranks`` alone."""
        mapped = sum(1 << rank for rank in self.mapped).to_bytes(-(-num_ranks // 8), "little")
        return _STATUS.pack(*self.host, self.name, self.token, _encode_rate(self.rate)) + mapped


def decode_status(data: bytes) -> Status:
    """The inverse of ``Status.encode``."""
    kernel, network, name, token, rate = _STATUS.unpack_from(data)
    bits = int.from_bytes(data[_STATUS.size :], "little")
    mapped = frozenset(rank for rank in range(8 * (len(data) - _STATUS.size)) if bits >> rank & 1)
    return Status(Host(kernel, network), name, token, mapped, _decode_rate(rate))


def _encode_rate(rate: int) -> int:
    """In a byte: the number of bits, and the two after the first."""
    num_bits = rate.bit_length()
    return min(255, num_bits << 2 | rate >> num_bits - _RATE_BITS & 3) if num_bits > _RATE_BITS else 0


def _decode_rate(code: int) -> int:
    """The middle of the rates with this code."""
    num_bits, rest = divmod(code, 4)
    return (9 + 2 * rest) << num_bits - _RATE_BITS - 1 if num_bits > _RATE_BITS else 0


class MemoryAgreement:
    """The segments of ``worker`` and of those it shares memory with. For the main thread.

    ``report`` gets the reason, once, why memory is not shared although it could be.
    """

    def __init__(
        self,
        worker: int,
        *,
        host: Host = NOWHERE,
        report: Callable[[str], None] = lambda reason: None,
        min_bytes: int | None = None,
    ) -> None:
        self._worker = worker
        self._host = host
        self._report = report
        self._given_bytes = min_bytes
        self._mailbox: Mailbox | None = None
        self._descriptor: int | None = None
        """Of the own segment, until all of the group have been sent it."""
        self._has_failed = False
        self._reason = ""
        """Why memory is not shared: the first cause."""
        self._key: Key | None = None
        self._known: dict[int, Status] = {}
        """By worker, the newest of those that are members."""
        self._forget_segments()

    def _forget_segments(self) -> None:
        self._close_descriptor()
        self._encoded: list[bytes] = []
        self._group: tuple[int, ...] = ()
        self._is_apart = False
        """Whether some are on this host in other containers."""
        self._own: Segment | None = None
        self._token = _NOTHING
        self._unsent: set[int] = set()
        self._mapped: dict[int, Segment] = {}
        self._groups: Groups = ()
        """Of all ranks; the same on all members in the same round."""
        self._min_bytes = self._given_bytes or MIN_SHARED_BYTES
        """Of a bucket that is folded by group; the same on all members in the same round."""
        self._rate = 0
        """See `Status`; measured once in a generation."""
        self._earlier: Mapping[int, Traffic] = {}
        """By worker, what was sent to it before this generation."""
        self._slowest = 0
        """The bytes a second that the links of the slowest host carry; the same on all members."""
        self._owners: tuple[int, ...] = ()
        """See `Sharing`; the same on all members in the same round."""

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def begin(self, spec: RoundSpec) -> SharedMemory:
        """Return what the round of ``spec`` uses."""
        key = spec.tag.generation, spec.members
        if key != self._key:
            self._forget_segments()
            self._key = key
            self._rank = spec.members.index(self._worker)
            self._find_group()
        if any(sums.numel() * sums.element_size() >= self._min_bytes for sums in spec.sums):
            self._offer()
        if not self._groups:
            return SharedMemory(Sharing(owners=self._owners))
        segments = {rank: self._mapped[rank] for rank in self.partners}
        if self._own is not None:
            segments[self._rank] = self._own
        return SharedMemory(Sharing(self._groups, self._min_bytes, owners=self._owners), segments)

    def status(self, traffic: Callable[[], Mapping[int, Traffic]]) -> bytes:
        """What this member says in the header of the round that has begun.

        ``traffic`` returns what was sent to each other member, by worker.
        """
        if not self._earlier:
            self._earlier = traffic()
        elif not self._rate and self._group:
            elsewhere = {worker for rank, worker in enumerate(self._members) if rank not in self._group}
            self._rate = _rate_of(traffic(), self._earlier, elsewhere)
        name = self._mailbox.name if self._mailbox else _NOTHING
        return Status(self._host, name, self._token, frozenset(self._mapped), self._rate).encode(len(self._members))

    def on_statuses(self, encoded: Sequence[bytes]) -> None:
        """Note what all members have said in the round that is complete, by rank."""
        if list(encoded) == self._encoded and not self._is_waiting():
            return
        self._encoded = list(encoded)
        self._known = dict(zip(self._members, map(decode_status, encoded), strict=True))
        if not self._group:
            self._find_group()
        self._map()
        # Of the statuses alone: all members draw the same conclusion from them.
        statuses = [self._status_of(rank) for rank in range(len(self._members))]
        self._groups = _grown(self._groups, [status.mapped for status in statuses])
        rates = _host_rates(statuses)
        self._slowest = min(rates.values(), default=0)
        self._owners = _owners(statuses, rates)
        self._min_bytes = self._given_bytes or _smallest_grouped(self._slowest)

    @property
    def path(self) -> str:
        """How the members exchange gradients in the round that has begun, for people; empty for a single one."""
        if len(self._members) < 2:
            return ""
        parts = [_path_of(Sharing(self._groups, self._min_bytes))]
        if self._slowest:
            parts.append(f"the links of the slowest host carry {_rate_text(self._slowest)}")
        if self._owners:
            parts.append(f"the sums are divided among {len(self._owners)} workers with faster links")
        if self._reason:
            parts.append(f"not all workers of a host share memory: {self._reason}")
        return "; ".join(parts)

    def end(self) -> None:
        """The round has failed: what it used is not used again."""
        self._key = None
        self._forget_segments()

    @property
    def partners(self) -> frozenset[int]:
        """The other ranks of the own group, in the next round of this generation."""
        return frozenset(Sharing(self._groups).group_of(self._rank)) - {self._rank}

    def close(self) -> None:
        """Release everything."""
        self.end()
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    @property
    def _members(self) -> tuple[int, ...]:
        assert self._key is not None
        return self._key[1]

    def _status_of(self, rank: int) -> Status:
        return self._known[self._members[rank]]

    def _find_group(self) -> None:
        """Find the ranks on this host, once all members are known."""
        if self._host == NOWHERE or not all(worker in self._known for worker in self._members):
            return
        hosts = [self._known[worker].host for worker in self._members]
        self._group = tuple(rank for rank, host in enumerate(hosts) if host == self._host)
        self._is_apart = any(host.kernel == self._host.kernel and host.network != self._host.network for host in hosts)

    def _is_waiting(self) -> bool:
        return any(
            self._status_of(rank).token != _NOTHING
            for rank in self._group
            if rank != self._rank and rank not in self._mapped
        )

    def _offer(self) -> None:
        """Open a mailbox; once the group is known, make the own segment, and send it to those that can receive it."""
        if self._has_failed or self._host == NOWHERE or len(self._members) < 2:
            return
        if self._is_apart:
            self._report_once("they run in different containers (network namespaces)")
        try:
            if self._mailbox is None:
                self._mailbox = Mailbox()
            if self._own is None and len(self._group) > 1:
                self._own, self._descriptor = create_segment(Sharing().segment_bytes)
                self._token = secrets.token_bytes(TOKEN_BYTES)
                self._unsent = {*self._group} - {self._rank}
        except OSError as error:
            self._fail(error)
            return
        for rank in sorted(self._unsent):
            self._send(self._mailbox, rank)
        if not self._unsent:
            self._close_descriptor()

    def _send(self, mailbox: Mailbox, rank: int) -> None:
        name = self._status_of(rank).name
        if name == _NOTHING or self._descriptor is None:
            return
        try:
            mailbox.send(name, self._token, self._descriptor)
        except BlockingIOError:  # its mailbox is full: again in the next round
            return
        except OSError as error:
            if not isinstance(error, ConnectionError):  # which means that it has gone
                self._report_once(str(error))
        self._unsent.discard(rank)

    def _map(self) -> None:
        """Map the segments that have come with the tokens that their makers named."""
        for rank in self._group:
            token = self._status_of(rank).token
            if rank == self._rank or rank in self._mapped or token == _NOTHING or self._mailbox is None:
                continue
            try:
                fd = self._mailbox.take(token)
            except OSError as error:
                self._fail(error)
                continue
            if fd is None:
                continue
            try:
                self._mapped[rank] = map_segment(fd, Sharing().segment_bytes)
            except (OSError, ValueError) as error:
                self._fail(error)
            finally:
                os.close(fd)

    def _fail(self, error: Exception) -> None:
        """Offer nothing from now on; what is agreed on stays, since the partners count on it."""
        self._has_failed = True
        self._report_once(str(error))

    def _report_once(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            self._report(f"workers of one host exchange gradients over TCP, and not in shared memory: {reason}")


def _rate_of(traffic: Mapping[int, Traffic], earlier: Mapping[int, Traffic], workers: Collection[int]) -> int:
    """The bytes a second that the links to ``workers`` carry together; 0 before enough was sent to say."""
    sent = [(traffic[worker], earlier.get(worker, Traffic())) for worker in workers if worker in traffic]
    num_bytes = sum(now.num_bytes - before.num_bytes for now, before in sent)
    return sum(now.rate_since(before) for now, before in sent) if num_bytes >= MEASURED_BYTES else 0


def _host_rates(statuses: Sequence[Status]) -> dict[Host, int]:
    """The bytes a second that the links of each host carry; nothing while not all have measured, or on one host.

    Of a host's members the median counts: a measurement may be far off.
    """
    rates: dict[Host, list[int]] = {}
    for status in statuses:
        rates.setdefault(status.host, []).append(status.rate)
    if len(rates) == 1 or not all(map(all, rates.values())):
        return {}
    return {host: len(of_host) * median_low(of_host) for host, of_host in rates.items()}


def _owners(statuses: Sequence[Status], rates: Mapping[Host, int]) -> tuple[int, ...]:
    """The ranks that own blocks: those on hosts that are not slow; nothing if none is, or if it makes no difference.

    Of N hosts one that owns the part f of a bucket sends and receives 1 + f (N - 2) times its size, so at least 1. If M
    others own the rest, they move 1 + (N - 2) / M times its size each, less than 3 times, since at most half of the
    hosts are slower than the median. A host whose links carry a third of theirs takes longer for 1 than they for that.
    """
    if len(rates) < 3:
        return ()
    slow = {host for host, rate in rates.items() if rate * SLOW_PART < median_high(rates.values())}
    return tuple(rank for rank, status in enumerate(statuses) if status.host not in slow) if slow else ()


def _smallest_grouped(slowest: int) -> int:
    """The bytes that the slowest host's links carry in the time of two hops inside a host, within limits."""
    return max(DIRECT_BYTES, min(MIN_SHARED_BYTES, int(slowest * HOP_SECONDS))) if slowest else MIN_SHARED_BYTES


def _path_of(sharing: Sharing) -> str:
    if not sharing.groups:
        return "over TCP"
    limit = f"for buckets of {sharing.min_bytes / 1024:.4g} KiB and more, TCP for smaller ones"
    if len(sharing.groups) == 1:
        return f"shared memory {limit}"
    sizes = [len(group) for group in sharing.groups]
    size = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    groups = f"{len(sizes)} groups of {size} workers"
    return f"shared memory within {groups} and one fold per group over TCP {limit}"


def _rate_text(bytes_per_second: int) -> str:
    megabits = bytes_per_second * 8 / 1e6
    return f"{megabits:.2g} Mbit/s" if megabits < 1000 else f"{megabits / 1000:.2g} Gbit/s"


def _grown(groups: Groups, mapped: Sequence[frozenset[int]]) -> Groups:
    """Join groups all of whose ranks have mapped each other's segments; nothing, if there are only single ranks."""
    grown: list[tuple[int, ...]] = []
    for group in groups or [(rank,) for rank in range(len(mapped))]:
        for number, other in enumerate(grown):
            if all(one in mapped[two] and two in mapped[one] for one in group for two in other):
                grown[number] = tuple(sorted(other + group))
                break
        else:
            grown.append(group)
    return tuple(grown) if len(grown) < len(mapped) else ()
