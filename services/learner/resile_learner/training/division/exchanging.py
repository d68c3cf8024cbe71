"""What calls of a divided model need of the run that it is trained in, and of the model."""

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn

from ...state.facts import Facts
from ..buffers import Buffers
from ..gradients import Gradients
from ..header import ComputedShards
from ..rounds import RoundResult, Rounds
from .accumulated import AccumulatedGradients
from .reading import OwnRows
from .rows import Cut


class Exchanging(Protocol):
    """What a divided model needs of the run that it is trained in."""

    buffers: Buffers
    num_shards: int
    accumulated: AccumulatedGradients

    @property
    def iteration(self) -> int:
        """The number of the open iteration."""

    @property
    def recomputes(self) -> bool:
        """Whether shards are computed again for their backward pass, one after the other, which takes less memory."""

    @property
    def num_samples(self) -> int:
        """The number of samples of the batch that the loader gave."""

    @property
    def rounds(self) -> Rounds:
        """Opens the rounds."""

    def warn(self, message: str) -> None:
        """Tell the user, once."""

    def exchange(
        self, compute: Callable[[], ComputedShards], facts: Callable[[], Facts], *, sums_of: object
    ) -> RoundResult:
        """Take part in a round within the body; ``compute`` may be called again, for other shards.

        ``facts`` are asked for after it, and must be equal on all workers. ``sums_of`` is what holds the round's sums,
        `Gradients` or `Buffers`, if it has any.
        """

    def place(self) -> tuple[int, int]:
        """Return the rank of this worker, and the number of workers."""

    def next_seed(self) -> int:
        """Return a seed for the next call, alike on all workers."""

    def sent_with_outputs(self, cut: Cut) -> OwnRows | None:
        """Return the batch whose small tensors are sent with the outputs of the call that was just given a seed."""

    @property
    def compares_first_shard(self) -> bool:
        """Whether this worker computes the first shard of the call that was just given a seed, to be compared."""

    def computing(self) -> AbstractContextManager[None]:
        """A shard is computed in this context. Raises NotRepeatable."""

    def computing_gradients(self, outputs: Sequence[Tensor]) -> AbstractContextManager[None]:
        """The backward pass of ``outputs`` runs in this context."""


class Divided(Protocol):
    """The model of a call."""

    run: Exchanging
    model: nn.Module
    parameters: list[Tensor]
    gradients: Gradients

    @property
    def sent_at_once(self) -> Container[int]:
        """The numbers of the outputs that are sent with each call, whatever their size."""

    def send_at_once(self, number: int) -> None:
        """Send output ``number`` with each call from now on."""

    def compute_in_full(self, reason: str) -> None:
        """Compute calls in full on each worker from now on."""

    def note_statistics(self, look: Callable[[], str]) -> None:
        """Once: warn of what ``look`` says of statistics of the batch."""

    def compute(self, args: Any, kwargs: Any) -> Any:
        """Compute a shard."""
