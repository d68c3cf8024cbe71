"""Sessions of one worker that record states, begin with one, or lose a round, for tests of recoveries and joins."""

from typing import Any

from torch import Tensor

from resile_learner.collectives.exchange import ExchangeRound
from resile_learner.collectives.spec import Abandoned, RoundSpec
from resile_learner.messages import Ready
from resile_learner.session import SoloSession
from resile_learner.state.run import RunState

FlatCopy = tuple[bytes, list[Tensor]]


class Copying(SoloSession):
    """Can copy the state of the run."""

    def join(self, ready: Ready, state: RunState) -> bool:
        self._state = state
        return super().join(ready, state)

    def _copy(self) -> FlatCopy:
        flat = self._state.flatten()
        return flat.skeleton, [tensor.clone() for tensor in flat.tensors]


class Recorded(Copying):
    """Keeps copies of the states with which members give rounds over to others: at its boundary, or abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.at_boundary: dict[int, FlatCopy] = {}
        self.in_round: dict[int, FlatCopy] = {}

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        self.at_boundary[spec.tag.round] = self._copy()
        opened = super().begin(spec)
        finish = opened.finish

        def recorded(header: bytes, *, may_leave: bool) -> Any:
            self.in_round[spec.tag.round] = self._copy()
            return finish(header, may_leave=may_leave)

        opened.finish = recorded  # type: ignore[method-assign]
        return opened


class AtBoundaries(Copying):
    """Keeps the states with which members join a loop whose body runs once for each batch, by the iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, FlatCopy] = {}

    def has_change(self, next_iteration: int) -> bool:
        return True  # so that there is a round between iterations

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        iteration = self._state.progress.iteration
        if iteration not in self.before:
            self.before[iteration] = self._copy()
        return super().begin(spec)


class Joining(SoloSession):
    """Begins with the state of another worker."""

    def __init__(self, received: FlatCopy) -> None:
        super().__init__()
        self._received = received

    def join(self, ready: Ready, state: RunState) -> bool:
        super().join(ready, state)
        state.load(*self._received)
        return False


class Losing(SoloSession):
    """Abandons a round, and goes on with the state of another worker, or else its own."""

    def __init__(self, lost_round: int, received: FlatCopy | None) -> None:
        super().__init__()
        self._lost_round: int | None = lost_round
        self._received = received

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        opened = super().begin(spec)
        if spec.tag.round == self._lost_round:
            self._lost_round = None

            def finish(header: bytes, *, may_leave: bool) -> tuple[bytes, ...]:
                raise Abandoned(1, "it was killed")

            opened.finish = finish  # type: ignore[method-assign]
        return opened

    def recover(self, lost: Abandoned, *, next_round: int, state: RunState) -> bool:
        if self._received is not None:
            state.load(*self._received)
        return self._received is not None
