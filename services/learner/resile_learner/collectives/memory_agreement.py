"""Which members of a generation share memory: they find out in the headers of its first rounds.

Every header of a round begins with a status. It says on which host a member is, where it receives descriptors, which
segment it has made for this generation, and whose segments it has mapped. All members have all statuses when a round is
complete, and so all know which members share memory: a group is a set of members each of which has said that it has
mapped the others' segments. The status of one round names the segments, that of the next one says they are mapped, and
the round after that uses them. A group grows if a member maps the segments late.

After a planned change, the new generation continues with the groups of the one before: the members that stay have
completed the same round, and the members that leave have read all of it (see `LinkRound.finish`). Joiners receive the
groups with the state. Any other generation begins without groups, and after a round has failed there are none.

Segments, which take longer to make than a small model's iteration, are kept in any case: in the first round of a
generation without groups members name the segments that they have, and say which they have mapped, so that the second
one uses them again. By then all members have completed a round of this generation, and read nothing older. A worker
that was left behind may still read a segment at any time. So a member names its segment only when the leases of all
such workers have ended (see `segments`); if that takes long, it makes another one, and never writes to the older one
again. Where memory cannot be shared, the connections carry everything, and the reason is reported.
"""

import os
from collections.abc import Callable, Mapping, Sequence

from .blocks import MIN_SHARED_BYTES, Groups, Sharing, groups_among, grown_groups
from .frames import WorkerGroups
from .link_rates import choose_owners, choose_racks, host_rates, rate_of, rate_text, smallest_grouped
from .reduction import SharedMemory
from .segments import NAME_BYTES, Mailbox, OwnSegment, Segment, map_segment
from .spec import RoundSpec
from .status import NO_RACK, NO_TOKEN, NOWHERE, Host, Status, decode_status, mapped_now, segments_digest, status_bytes
from .transport import Traffic

_NO_NAME = bytes(NAME_BYTES)
_PATIENT_ROUNDS = 4
"""A member waits this many rounds of a generation for non-members to release its segment, then makes another one."""
Key = tuple[int, tuple[int, ...]]


class MemoryAgreement:
    """The segments of ``worker`` and of those it shares memory with. For the main thread.

    ``report`` gets, once, the reason why memory is not shared although it could be.
    """

    def __init__(
        self,
        worker: int,
        *,
        host: Host = NOWHERE,
        rack: bytes = NO_RACK,
        report: Callable[[str], None] = lambda reason: None,
        min_bytes: int | None = None,
    ) -> None:
        self._worker = worker
        self._host = host
        self._rack = rack
        self._report = report
        self._given_bytes = min_bytes
        self._mailbox: Mailbox | None = None
        self._own: OwnSegment | None = None
        self._mapped: dict[int, tuple[bytes, Segment]] = {}
        """The mapped segments of other workers, each with its token, by worker."""
        self._has_failed = False
        self._reason = ""
        """Why memory is not shared: the first cause."""
        self._key: Key | None = None
        self._known: dict[int, Status] = {}
        """The newest status of each member, by worker."""
        self._forget_agreement()

    def _forget_agreement(self) -> None:
        self._encoded: list[bytes] = []
        self._group: tuple[int, ...] = ()
        self._is_apart = False
        """Whether some members run on this host in other containers."""
        self._num_offers = 0
        """Number of rounds of this generation in which this member tried to share memory."""
        self._is_settled = False
        """Whether all other members on this host have mapped the own segment."""
        self._released: frozenset[int] = frozenset()
        """Workers that have left and no longer read any segment, even if their leases have not ended."""
        self._unreachable: set[bytes] = set()
        """Names of the mailboxes that the own segment could not be sent to."""
        self._groups: Groups = ()
        """The groups of all ranks; the same on all members in the same round."""
        self._min_bytes = self._given_bytes or MIN_SHARED_BYTES
        """Size of the smallest bucket that is folded by group; the same on all members in the same round."""
        self._rate = 0
        self._far_rate = 0
        """``_rate`` and ``_far_rate``: see `Status`; measured once in a generation."""
        self._earlier: Mapping[int, Traffic] = {}
        """What was sent to each worker before this generation, by worker."""
        self._slowest = 0
        """Bytes per second that the links of the slowest host carry, 0 if unknown; the same on all members."""
        self._owners: tuple[int, ...] = ()
        self._racks: Groups = ()
        """``_owners`` and ``_racks``: see `Sharing`; the same on all members in the same round."""

    def prewarm(self, *, num_bytes: int) -> None:
        """Before the first round, while no member waits: make the memory for buckets of ``num_bytes`` to be shared."""
        if num_bytes >= self._min_bytes and self._host != NOWHERE:
            try:
                self._mailbox = self._mailbox or Mailbox()
                self._own = self._own or OwnSegment(Sharing().segment_bytes)
                for offset in (0, Sharing().results_offset):
                    self._own.segment.populate(offset, min(num_bytes, Sharing().results_offset))
            except OSError as error:
                self._fail(error)

    def begin(self, spec: RoundSpec) -> SharedMemory:
        """Return the shared memory that the round of ``spec`` uses."""
        key = spec.tag.generation, spec.members
        if key != self._key:
            self._begin_generation(key)
        if any(sums.numel() * sums.element_size() >= self._min_bytes for sums in spec.sums):
            self._offer()
        segments = {rank: self._mapped[self._members[rank]][1] for rank in self.partners}
        if self._own is not None:
            segments[self._rank] = self._own.segment
        return SharedMemory(self._sharing, segments)

    def _begin_generation(self, key: Key) -> None:
        self._forget_agreement()
        self._key = key
        if self._mailbox is not None:
            self._mailbox.drop_before(self._generation)
        self._mapped = {worker: each for worker, each in self._mapped.items() if worker in self._members}
        self._rank = self._members.index(self._worker)
        self._find_group()

    @property
    def groups(self) -> WorkerGroups:
        """The workers that share memory, in the next round of this generation."""
        return [[self._members[rank] for rank in group] for group in self._groups if len(group) > 1]

    def continue_in(self, generation: int, members: tuple[int, ...], groups: WorkerGroups) -> None:
        """Begin a generation with the ``groups`` of the one before.

        All members of that one have completed the same round of it, and those that leave have read all of that round.
        """
        left = frozenset(self._members).difference(members) if self._key else frozenset()
        released = self._released | left
        self._begin_generation((generation, members))
        self._released = released
        self._groups = groups_among(members, groups)

    @property
    def status_bytes(self) -> int:
        """The length of the status of each member in this generation."""
        return status_bytes(len(self._members))

    @property
    def _sharing(self) -> Sharing:
        return Sharing(self._groups, min_bytes=self._min_bytes, owners=self._owners, racks=self._racks)

    def status(self, traffic: Callable[[], Mapping[int, Traffic]]) -> bytes:
        """What this member says in the header of the round that has begun.

        ``traffic`` returns what was sent to each other member, by worker.
        """
        self._measure(traffic)
        name = self._mailbox.name if self._mailbox else _NO_NAME
        token = self._own.token if self._own and not self._strangers(self._own) else NO_TOKEN
        tokens = self._mapped_tokens()
        status = Status(
            self._host, name, token, frozenset(tokens), self._rate, self._rack, self._far_rate, segments_digest(tokens)
        )
        return status.encode(len(self._members))

    def _mapped_tokens(self) -> dict[int, bytes]:
        """The tokens of the segments that are mapped here, by rank, unless their makers name other segments now."""
        mapped = {rank: self._mapped[worker][0] for rank, worker in enumerate(self._members) if worker in self._mapped}
        if not self._encoded:
            return mapped
        return {rank: token for rank, token in mapped.items() if self._status_of(rank).token == token}

    def _strangers(self, own: OwnSegment) -> set[int]:
        """Workers that are not members but, by their leases, may still read the own segment."""
        return set() if self._is_settled else own.readers().difference(self._members, self._released)

    def _measure(self, traffic: Callable[[], Mapping[int, Traffic]]) -> None:
        """Measure the rates of the links to other hosts, once these have carried enough."""
        if not self._earlier:
            self._earlier = traffic()
            return
        elsewhere = {worker for rank, worker in enumerate(self._members) if rank not in self._group}
        if not self._group or not elsewhere or self._rate + self._far_rate:
            return
        now = traffic()
        if rate_of(now, self._earlier, elsewhere):
            far = {worker for worker in elsewhere if self._known[worker].rack != self._rack}
            self._rate = rate_of(now, self._earlier, elsewhere - far, least=0)
            self._far_rate = rate_of(now, self._earlier, far, least=0)

    def on_statuses(self, encoded: Sequence[bytes]) -> None:
        """Process the statuses of all members in a complete round, by rank."""
        if list(encoded) == self._encoded and not self._is_waiting():
            return
        self._encoded = list(encoded)
        self._known = dict(zip(self._members, map(decode_status, encoded), strict=True))
        if not self._group:
            self._find_group()
        self._map()
        # From the statuses alone, so that all members reach the same result.
        statuses = [self._status_of(rank) for rank in range(len(self._members))]
        mapped = mapped_now(statuses)
        self._is_settled = all(self._rank in mapped[rank] for rank in self._group if rank != self._rank)
        self._groups = grown_groups(self._groups, mapped)
        rates = host_rates(statuses)
        self._slowest = min(rates.values(), default=0)
        self._owners = choose_owners(statuses, rates)
        self._racks = choose_racks(statuses, self._groups)
        if self._racks and not self._groups:
            self._groups = tuple((rank,) for rank in range(len(statuses)))
        self._min_bytes = self._given_bytes or smallest_grouped(self._slowest)

    @property
    def path(self) -> str:
        """Human-readable description of how the members exchange gradients in this round; empty for a single member."""
        if len(self._members) < 2:
            return ""
        parts = [self._sharing.path]
        if self._slowest:
            parts.append(f"the links of the slowest host carry {rate_text(self._slowest)}")
        if self._owners:
            parts.append(f"the sums are divided among {len(self._owners)} workers with faster links")
        if self._reason:
            parts.append(f"not all workers of a host share memory: {self._reason}")
        return "; ".join(parts)

    def end(self) -> None:
        """Forget the agreement, since the round has failed: members agree anew in the next one that all have begun."""
        self._key = None
        self._forget_agreement()

    @property
    def partners(self) -> frozenset[int]:
        """The other ranks of the own group, in the next round of this generation."""
        return frozenset(Sharing(self._groups).group_of(self._rank)) - {self._rank}

    def close(self) -> None:
        """Release everything."""
        self.end()
        self._mapped = {}
        self._drop_own()
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def _drop_own(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    @property
    def _generation(self) -> int:
        assert self._key is not None
        return self._key[0]

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
        return any(self._lacks(rank) for rank in self._group if rank != self._rank)

    def _lacks(self, rank: int) -> bool:
        """Whether a rank has named a segment that is not mapped here."""
        token = self._status_of(rank).token
        mapped, _ = self._mapped.get(self._members[rank], (NO_TOKEN, None))
        return token not in (NO_TOKEN, mapped)

    def _offer(self) -> None:
        """Open a mailbox; once the group is known, make the own segment, and send it to those that can receive it."""
        if self._has_failed or self._host == NOWHERE or len(self._members) < 2:
            return
        if self._is_apart:
            self._report_once("they run in different containers (network namespaces)")
        if self._is_settled:
            return
        self._num_offers += 1
        if self._own and self._num_offers > _PATIENT_ROUNDS and self._strangers(self._own):
            self._drop_own()
        try:
            self._mailbox = self._mailbox or Mailbox()
            if self._own is None and len(self._group) > 1:
                self._own = OwnSegment(Sharing().segment_bytes)
        except OSError as error:
            self._fail(error)
            return
        if self._own and not self._strangers(self._own):
            self._send(self._own, self._mailbox)

    def _send(self, own: OwnSegment, mailbox: Mailbox) -> None:
        readers, without_mailbox = own.readers(), {_NO_NAME, *self._unreachable}
        for worker in (self._members[rank] for rank in self._group if rank != self._rank):
            name = self._known[worker].name
            if worker in readers or name in without_mailbox:
                continue
            try:
                own.send(mailbox, name, worker=worker, generation=self._generation)
            except BlockingIOError:  # its mailbox is full: again in the next round
                continue
            except OSError as error:
                if not isinstance(error, ConnectionError):  # which means that it has gone
                    self._report_once(str(error))
                self._unreachable.add(name)

    def _map(self) -> None:
        """Map the segments that have arrived with the tokens that their makers named."""
        for rank in self._group:
            if rank == self._rank or self._mailbox is None or not self._lacks(rank):
                continue
            token = self._status_of(rank).token
            try:
                received = self._mailbox.take(token)
            except OSError as error:
                self._fail(error)
                continue
            if received is None:
                continue
            try:
                segment = map_segment(received.memory, Sharing().segment_bytes, received.lease)
                self._mapped[self._members[rank]] = token, segment
            except (OSError, ValueError) as error:
                os.close(received.lease)
                self._fail(error)
            finally:
                os.close(received.memory)

    def _fail(self, error: Exception) -> None:
        """Offer no memory from now on; what is agreed stays, since the partners count on it."""
        self._has_failed = True
        self._report_once(str(error))

    def _report_once(self, reason: str) -> None:
        if not self._reason:
            self._reason = reason
            self._report(f"workers of one host exchange gradients over TCP, and not in shared memory: {reason}")
