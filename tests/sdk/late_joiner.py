"""A worker that joins a run when its last iteration is over: it takes over the state, and has nothing to train.

When training is over here, it has the second rank.
"""

from collections.abc import Callable
from contextvars import Context
from dataclasses import replace
from typing import Any

from resile_learner.messages import Ready
from resile_learner.session import SoloSession, enter_session
from resile_learner.state.run import RunState


class _Donor(SoloSession):
    def join(self, ready: Ready, state: RunState) -> bool:
        self._state = state
        return super().join(ready, state)

    def complete(self) -> None:
        flat = self._state.flatten()
        self.facts, self.skeleton = dict(self._state.facts), flat.skeleton
        self.tensors = [tensor.clone() for tensor in flat.tensors]


class _Joiner(SoloSession):
    def __init__(self, donor: _Donor) -> None:
        super().__init__()
        self._donor = donor

    def join(self, ready: Ready, state: RunState) -> bool:
        super().join(ready, state)
        state.facts = self._donor.facts
        state.load(self._donor.skeleton, self._donor.tensors)
        return False

    def complete(self) -> None:
        self.view = replace(self.view, workers=(1, 0))


def train_and_join_late(train: Callable[[], Any], join: Callable[[], Any]) -> None:
    """Run ``train``, a script's training call, and then ``join`` as that of a worker that comes too late to train."""

    def as_session(session: SoloSession, call: Callable[[], Any]) -> None:
        enter_session(session)
        call()

    donor = _Donor()
    Context().run(as_session, donor, train)
    Context().run(as_session, _Joiner(donor), join)
