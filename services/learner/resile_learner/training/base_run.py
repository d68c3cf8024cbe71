"""What every run of a training call has, and what a script may ask of it."""

from collections.abc import Sequence

from torch import nn

from ..messages import Warned
from ..session import Session
from ..state.run import RunState
from .data.batches import Position
from .determinism import Reproducibility
from .digest import params_sha256
from .protocol import TrainingProtocol
from .reports import Result
from .seeds import mix, seed_all
from .settings import TrainingSettings


class BaseRun:
    """A run on one worker: its ``state``, and its part in the protocol that all members follow."""

    model: nn.Module
    settings: TrainingSettings
    session: Session
    state: RunState
    _protocol: TrainingProtocol
    _reproducibility: Reproducibility
    _notes: Sequence[str] = ()
    """What the user should know before the first iteration."""

    def stop(self) -> None:
        """End the run after the open iteration, on all workers alike."""
        if not self.result:  # of others, for a worker that was behind at the end
            self.state.progress.iterations_total = self.iteration + 1

    @property
    def iteration(self) -> int:
        """Iterations committed so far: the number of the next one."""
        return self.state.progress.iteration

    @property
    def iterations_total(self) -> int:
        """The number of iterations after which the run ends; an estimate if the batch may change."""
        return self.state.progress.iterations_total

    @property
    def result(self) -> Result | None:
        """How the run ended; None before its end."""
        return self._protocol.result

    @property
    def reproducibility(self) -> str:
        """Whether the parameters are the same bits in every run of this kind; if not, why."""
        return str(self._reproducibility)

    @property
    def operations(self) -> tuple[str, ...]:
        """Operations without a deterministic form that this worker knows of."""
        return self._reproducibility.operations

    def begin_iteration(self, iteration: int) -> None:
        """The state before ``iteration`` is in place: it was committed, received or loaded."""
        seed_all(mix(self.settings.seed, "between", iteration))

    def params_sha256(self) -> str:
        """The digest of the final parameters."""
        return params_sha256(self.model)

    def warn(self, message: str) -> None:
        """Tell the user, if this is the worker that does."""
        if self.session.view.rank == 0:
            self.session.report(Warned(worker=self.session.view.me, message=message))

    def _warn_of_notes(self) -> None:
        for note in self._notes if self.iteration == 0 else ():
            self.warn(note)

    @property
    def _position(self) -> Position:
        return Position(self.state.progress.epoch, self.state.progress.sample)
