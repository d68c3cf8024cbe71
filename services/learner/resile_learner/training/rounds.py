"""Rounds: one exchange among all members, its headers compared and folded."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from resile_shared.errors import ResileError

from ..collectives.exchange import OpenRound, RoundSpec, Tag
from ..collectives.tree import Interval, pieces, ranges
from .batches import Indices
from .buffers import Buffers
from .header import Header, Partial, Totals
from .session import Session
from .stragglers import Pace


class MembersDiffer(ResileError):
    """Something that must be equal on all members is not."""


@dataclass
class RoundResult:
    """What a finished round says."""

    tag: Tag
    headers: Sequence[Header]
    totals: Totals
    last: tuple[int, float]
    """The rank whose words came last, and for how long it was the only one that was waited for."""
    named: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.named = tuple(header.named for header in self.headers)


class Rounds:
    """Opens and finishes the rounds of one run."""

    def __init__(self, session: Session, buffers: Buffers) -> None:
        self._session = session
        self._buffers = buffers
        self.number = 0

    @staticmethod
    def pieces(num_leaves: int, held: Interval) -> tuple[Interval, ...]:
        """The complete subtrees inside ``held``, left to right: what a member sends partial sums of."""
        return pieces(num_leaves, held)

    def open(self, num_leaves: int, partials: Sequence[Sequence[Tensor]] = (), sums: Sequence[Tensor] = ()) -> "Round":
        """Open the next round over ``num_leaves`` shards, held in equal ranges by the current members."""
        view = self._session.view
        held = tuple(pieces(num_leaves, part) for part in ranges(num_leaves, view.size))
        tag = Tag(view.generation, self.number, 0)
        self.number += 1
        spec = RoundSpec(tag, view.workers, held, num_leaves, partials, sums)
        return Round(self._session, self._buffers, spec)


class Round:
    """A round under way."""

    def __init__(self, session: Session, buffers: Buffers, spec: RoundSpec) -> None:
        self._session = session
        self._buffers = buffers
        self._spec = spec
        self.exchange: OpenRound = session.begin(spec)

    def finish(
        self,
        *,
        next_iteration: int,
        digest: int,
        indices: Indices | None = None,
        used: Sequence[bool] = (),
        partials: Sequence[Partial] = (),
        stored: Sequence[tuple[str, int, int, str]] = (),
        saved: Sequence[str] = (),
        dropped: Sequence[str] = (),
        holds: Sequence[str] | None = None,
        facts: Mapping[str, str] | None = None,
        busy: bool = False,
        pause: bool = False,
        checkpoint: bool = False,
        pace: Pace | None = None,
    ) -> RoundResult:
        """Send this member's header, wait for all, and compare what must be equal.

        Raises Abandoned when a member was lost on the way.
        """
        header = Header(
            named=self._session.named(next_iteration),
            digest=digest,
            used=bytes(used),
            partials=partials,
            stored=stored,
            saved=saved,
            dropped=dropped,
            holds=holds,
            facts=facts or {},
            busy=busy,
            pause=pause,
            checkpoint=checkpoint,
            pace=pace,
        )
        if indices is not None:
            header.indices = indices
        raw = self.exchange.finish(header.encode())
        headers = [Header.decode(data, self._buffers.like) for data in raw]
        self._compare(headers)
        totals = Totals.of(headers, self._spec.pieces, self._spec.num_leaves)
        return RoundResult(self._spec.tag, headers, totals, self.exchange.last)

    def _compare(self, headers: Sequence[Header]) -> None:
        for name in headers[0].facts:
            who = self._minority([header.facts.get(name) for header in headers])
            if who:
                raise MembersDiffer(
                    f"{who} has another {name} than the others: all workers must build the same, so take away what "
                    "depends on "
                    "the worker, the time or the machine (resile.training.seed() seeds a script)"
                )
        who = self._minority([header.digest for header in headers])
        if who:
            raise MembersDiffer(
                f"{who} has other parameters than the others after round {self._spec.tag.round - 1}: its update "
                "differed; "
                "look for code that treats workers differently, or for a faulty machine"
            )

    def _minority(self, values: Sequence[object]) -> str:
        """The workers whose value is not the most common one, as text; empty when all are equal."""
        common, count = Counter(values).most_common(1)[0]
        if count == len(values):
            return ""
        members = self._spec.members
        different = [str(worker) for worker, value in zip(members, values, strict=True) if value != common]
        return ("worker " if len(different) == 1 else "workers ") + ", ".join(different)
