"""Rounds that a loss does not end: the members that are left repeat them, or take their outcome from one that has it.

The body of a loop cannot be repeated, and members are at most one round apart. So a member that missed the end of a
round takes what that round returned from a member that completed it, and goes on as if it had been there: the raw
headers and the sums, from which everything else follows.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..collectives.spec import Abandoned, OtherRound, Repeated
from ..session import Session
from ..state.flat import FlatState, allocate, flatten, unflatten
from ..state.run import TrainingProgress
from .buffers import Buffers
from .header import ComputedShards, RoundHeader
from .rounds import Round, RoundResult, Rounds


class RoundOutcome:
    """What the newest complete round returned, as `Session.recover` hands it over."""

    def __init__(self, progress: Callable[[], TrainingProgress]) -> None:
        self._progress = progress
        self._tree: dict[str, Any] = {"round": -1, "headers": [], "sums": []}
        self._receiving: tuple[bytes, list[Tensor]] | None = None
        self.received: dict[str, Any] | None = None

    def keep(self, completed: Round, result: RoundResult) -> None:
        """Keep what ``completed`` returned. Its sums stay where they are: nobody may write there before the next."""
        self._tree = {"round": completed.number, "headers": list(result.raw), "sums": list(completed.sums)}

    @property
    def progress(self) -> TrainingProgress:
        """How far the run has come."""
        return self._progress()

    def flatten(self) -> FlatState:
        """Return the outcome."""
        return flatten(self._tree)

    def allocate_buffers(self, skeleton: bytes, *, on_host: bool = False, keeps_state: bool = False) -> list[Tensor]:
        """Return memory for an outcome."""
        self._receiving = skeleton, allocate(skeleton)
        return self._receiving[1]

    def load_received(self) -> None:
        """Keep the outcome that was received."""
        assert self._receiving is not None
        self.received, self._receiving = unflatten(*self._receiving), None

    def drop_received(self) -> None:
        """No more of that outcome comes."""
        self._receiving = None


class RepeatedRounds(Rounds):
    """Rounds that end with an outcome, whoever is lost.

    ``recovering(lost, recover)`` lets ``recover`` find a generation without the lost member, and returns what it does.
    """

    def __init__(
        self,
        session: Session,
        buffers: Buffers,
        progress: Callable[[], TrainingProgress],
        *,
        recovering: Callable[[Abandoned, Callable[[], bool]], bool],
    ) -> None:
        super().__init__(session, buffers)
        self._recovering = recovering
        self._outcome = RoundOutcome(progress)
        self.sums_of: object = None
        """What holds the sums of the newest round: they are to stay as they are until the next one is complete."""

    def exchange(
        self,
        compute: Callable[[], ComputedShards],
        header: Callable[[], RoundHeader],
        *,
        next_iteration: int,
        trains: bool = False,
        holds: bool = False,
    ) -> RoundResult:
        """See `Rounds.exchange`; ``compute`` is called again for the shards of another generation."""
        while True:
            number, self.newest = self.number, None
            try:
                result = super().exchange(compute, header, next_iteration=next_iteration, trains=trains, holds=holds)
            except Repeated:
                continue
            except Abandoned as lost:
                if self.recover(lost, number):
                    return self._received(number)
                self.number = number
            else:
                assert self.newest is not None
                self._keep(self.newest, result)
                return result

    def _keep(self, completed: Round, result: RoundResult) -> None:
        self._outcome.keep(completed, result)
        self.sums_of = None

    def recover(self, lost: Abandoned, number: int) -> bool:
        """Continue without the lost member; return whether others have completed round ``number`` without this one."""
        return self._recovering(lost, lambda: self._session.recover(lost, next_round=number, state=self._outcome))

    def _received(self, number: int) -> RoundResult:
        """Complete the newest round by what another member received in it."""
        tree, self._outcome.received = self._outcome.received, None
        assert tree is not None
        if self.newest is None or tree["round"] != number or self.newest.number != number:
            raise OtherRound("another worker")
        for mine, sums in zip(self.newest.sums, tree["sums"], strict=True):
            mine.copy_(sums)
        self.number = number + 1
        result = self.newest.outcome(tree["headers"])
        self._keep(self.newest, result)
        return result
