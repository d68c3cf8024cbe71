"""Rounds: one exchange among all members, its headers compared and folded."""

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from ..collectives.device.exchange import ExchangeRound
from ..collectives.spec import Abandoned, OtherRound, RoundSpec, Tag
from ..collectives.tree import Interval, pieces, ranges
from ..session import Session
from ..state.facts import MembersDiffer, check_members_agree, minority, without_parts
from .buffers import Buffers
from .header import ComputedShards, RoundHeader, Totals
from .metric_names import find_partial_metric
from .watch.repeatability import check_fingerprints
from .watch.shard_values import UnknownRule


@dataclass(frozen=True)
class RoundResult:
    """The outcome of a finished round."""

    tag: Tag
    headers: Sequence[RoundHeader]
    named: Sequence[int]
    """[rank]: the highest generation that the member had formed."""
    totals: Totals
    last: tuple[int, float]
    """The rank whose header came last, and the seconds for which it was the only one missing."""
    path: str
    """How gradients were exchanged, as text for people."""
    raw: Sequence[bytes] = ()
    """[rank]: the headers as they were received."""

    @property
    def late(self) -> list[int]:
        """The buffers whose changes a round that follows combines."""
        return sorted({index for header in self.headers for index in header.computed.late})


class Rounds:
    """Opens and finishes the rounds of one run."""

    def __init__(self, session: Session, buffers: Buffers) -> None:
        self._session = session
        self._buffers = buffers
        self.number = 0
        self.newest: Round | None = None
        """The round that was opened last."""

    def exchange(
        self,
        compute: Callable[[], ComputedShards],
        header: Callable[[], RoundHeader],
        *,
        next_iteration: int,
        trains: bool = False,
        holds: bool = False,
    ) -> RoundResult:
        """Take part in the next round: ``compute`` opens it, and pushes the sums of this worker's shards.

        ``header`` is called after it. See `Round.finish`.
        """
        computed = compute()
        own = header()
        assert self.newest is not None
        own = replace(own, computed=computed._replace(operations=own.computed.operations))
        return self.newest.finish(own, next_iteration=next_iteration, trains=trains, holds=holds)

    def exchange_headers(
        self, header: Callable[[], RoundHeader], *, next_iteration: int, trains: bool = False, holds: bool = False
    ) -> RoundResult:
        """Take part in a round without shards."""

        def compute() -> ComputedShards:
            self.open(0)
            return ComputedShards()

        return self.exchange(compute, header, next_iteration=next_iteration, trains=trains, holds=holds)

    def open(
        self,
        num_leaves: int,
        partials: Sequence[Sequence[Tensor]] = (),
        sums: Sequence[Tensor] = (),
        *,
        maxima: Container[int] = (),
    ) -> "Round":
        """Open the next round over ``num_leaves`` shards, held in equal ranges by the current members.

        See `RoundSpec` for the others.
        """
        view = self._session.view
        if sums and self._session.agree_on_carrier(Tag(view.generation, self.number)):
            self.number += 1
        held = tuple(pieces(num_leaves, part) for part in ranges(num_leaves, view.size))
        tag = Tag(view.generation, self.number)
        self.number += 1
        spec = RoundSpec(tag, view.workers, held, num_leaves, partials, sums, maxima)
        self.newest = Round(self._session, self._buffers, spec)
        return self.newest

    def withdraw(self, opened: "Round") -> None:
        """Withdraw the newest round, in which nothing was exchanged: the next one gets its number."""
        opened.exchange.withdraw()
        self.number = opened.number


class Round:
    """A round in progress."""

    def __init__(self, session: Session, buffers: Buffers, spec: RoundSpec) -> None:
        self._session = session
        self._buffers = buffers
        self._spec = spec
        self.exchange: ExchangeRound = session.begin(spec)

    @property
    def number(self) -> int:
        """The number of the round among all rounds of the job."""
        return self._spec.tag.round

    @property
    def sums(self) -> Sequence[Tensor]:
        """[bucket]: where the sums over all leaves are once the round is complete."""
        return self._spec.sums

    def finish(
        self, header: RoundHeader, *, next_iteration: int, trains: bool = False, holds: bool = False
    ) -> RoundResult:
        """Send this member's header, wait for those of all others, and compare what must be equal.

        ``trains``: it is a round of an iteration, so training can pause after it. ``holds``: no change of membership
        takes effect after it.

        Raises Abandoned when a member was lost meanwhile, MembersDiffer when members differ, OtherRound at once when
        they compute different things: the others then wait for what this member never sends.
        """
        with self._session.changes.step("exchange", round=self._spec.tag.round, path=self.exchange.path):
            if holds:
                raw = self.exchange.finish(header.encode(generation=self._spec.tag.generation))
            else:
                is_paused = header.checkpoint.pause is not None
                generation = self._session.named(next_iteration, can_pause=trains or is_paused)
                if trains:
                    header = replace(header, pause=self._session.pause_asked)
                may_leave = not self._session.is_member_of(generation)
                raw = self.exchange.finish(header.encode(generation=generation), may_leave=may_leave)
        return self.outcome(raw)

    def outcome(self, raw: Sequence[bytes]) -> RoundResult:
        """Compare what must be equal, and fold the headers that this member, or another one, has received."""
        if not all(raw):  # a member agrees on how sums travel
            raise OtherRound("another worker")
        named, headers = zip(*(RoundHeader.decode(data, self._buffers.like) for data in raw), strict=True)
        self._check_shards(headers)
        try:
            self._compare(headers)
        except (MembersDiffer, UnknownRule):
            self._await_all()
            raise
        totals = Totals.of(
            [each.computed for each in headers], self._spec.pieces, self._spec.num_leaves, self._buffers.add
        )
        return RoundResult(self._spec.tag, headers, named, totals, self.exchange.last, self.exchange.path, raw)

    def _check_shards(self, headers: Sequence[RoundHeader]) -> None:
        computed = [
            len(header.computed.partials) == len(held) for header, held in zip(headers, self._spec.pieces, strict=True)
        ]
        others = [str(worker) for worker, is_same in zip(self._spec.members, computed, strict=True) if not is_same]
        if others:
            raise OtherRound(("worker " if len(others) == 1 else "workers ") + ", ".join(others))

    def _compare(self, headers: Sequence[RoundHeader]) -> None:
        has_same_bits = not any(header.computed.operations for header in headers)
        facts = [header.facts if has_same_bits else without_parts(header.facts) for header in headers]
        check_members_agree(facts, self._spec.members)
        given = [
            (Interval(held[0].lo, held[-1].hi), header.computed.partials[0].scalars)
            for header, held in zip(headers, self._spec.pieces, strict=True)
            if held
        ]
        if partial := find_partial_metric(given):
            raise MembersDiffer(partial)
        fingerprints = [header.computed.first_shard for header in headers]
        check_fingerprints(fingerprints, self._spec.members, has_same_bits=has_same_bits)
        self._buffers.values.check([header.computed.left for header in headers if header.computed.partials])
        _, who = minority([header.digest for header in headers], self._spec.members)
        if who:
            raise MembersDiffer(
                f"the parameters of {who} differ from the others' after round {self._spec.tag.round - 1}: the "
                "update was not the same. Look for code that treats workers differently, or for a faulty machine"
            )

    def _await_all(self) -> None:
        """Wait until every member has all headers of this round, or is lost.

        When a member exits, the round of a member that still lacks a header is aborted: that member would never learn
        of the difference, and would train on without the others.
        """
        tag = Tag(self._spec.tag.generation, self._spec.tag.round + 1)
        nothing = replace(
            self._spec, tag=tag, pieces=((),) * len(self._spec.members), num_leaves=0, partials=(), sums=(), maxima=()
        )
        with suppress(Abandoned):
            self._session.begin(nothing).finish(b"")
