"""What an iteration is given: which shards it computes, and the parts of the run that it works on."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.amp import GradScaler

from ..collectives.tree import Interval
from ..session import Session, View
from ..state.run import RunState
from .attributes import ScriptAttributes
from .buffers import Buffers
from .data.batches import Batch, Position
from .data.shard_source import ShardSource
from .determinism import Determinism
from .gradients import Gradients
from .loss_weights import LossWeights
from .received import ReceivedState
from .rounds import Rounds
from .watch.body_watch import BodyWatch
from .watch.joint_rows import JointRows


@dataclass(frozen=True, kw_only=True)
class IterationSpec:
    """Which shards of an iteration this worker computes, and what is compared."""

    number: int
    batch: Batch
    position: Position
    """Where ``batch`` begins."""
    turn: int
    """The number of the optimizer that steps in this iteration."""
    num_turns: int
    view: View
    seed: int
    is_compared: bool
    """Whether workers compare what they compute of the first shard."""
    keeps_shards: bool
    """Whether shards are kept, since a closure will compute them again."""
    has_epochs: bool
    """Whether the script has code of its own around the epochs, which is not repeated when a member is lost."""
    last: tuple[int, float]
    """The rank whose header of the round before came last, and the seconds for which it was the only one missing."""

    @property
    def held(self) -> Interval:
        """The shards that this worker computes."""
        return self.batch.held_by(self.view.rank, self.view.size)

    @property
    def leaves(self) -> Interval:
        """The leaves of the tree that this worker has the sums of."""
        return self.batch.leaves_of(self.view.rank, self.view.size)

    @property
    def is_last_turn(self) -> bool:
        """Whether the batch is done after this iteration."""
        return self.turn == self.num_turns - 1

    @property
    def measures_noise(self) -> bool:
        """Whether the noise of the gradients is measured."""
        return self.batch.measures_noise and self.turn == 0


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """What all iterations of a run work on."""

    session: Session
    source: ShardSource
    state: RunState
    rounds: Rounds
    gradients: Sequence[Gradients]
    """[turn]: the gradients that an optimizer steps with."""
    buffers: Buffers
    attributes: ScriptAttributes
    received: ReceivedState
    scalers: Sequence[GradScaler]
    loss_weights: LossWeights | None
    """Looks at the losses of shards; None: they count by their samples."""
    watch: BodyWatch
    joint: JointRows
    determinism: Determinism
