"""Sessions of one worker that record states, begin with one, or lose a round, for tests of recoveries and joins."""

from typing import Any

from torch import Tensor

from resile_learner.collectives.device.exchange import ExchangeRound
from resile_learner.collectives.spec import Abandoned, RoundSpec
from resile_learner.messages import Ready
from resile_learner.session import SoloSession
from resile_learner.state.run import RunState

FlatCopy = tuple[bytes, list[Tensor]]


class Recorded(SoloSession):
    """Keeps copies of the states with which members give rounds over to others: at its boundary, or abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.at_boundary: dict[int, FlatCopy] = {}
        self.in_round: dict[int, FlatCopy] = {}

    def join(self, ready: Ready, state: RunState) -> bool:
        self._state = state
        return super().join(ready, state)

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        self.at_boundary[spec.tag.round] = self._copy()
        opened = super().begin(spec)
        finish = opened.finish

        def recorded(header: bytes, *, may_leave: bool) -> Any:
            self.in_round[spec.tag.round] = self._copy()
            return finish(header, may_leave=may_leave)

        opened.finish = recorded  # type: ignore[method-assign]
        return opened

    def _copy(self) -> FlatCopy:
        flat = self._state.flatten()
        return flat.skeleton, [tensor.clone() for tensor in flat.tensors]


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
