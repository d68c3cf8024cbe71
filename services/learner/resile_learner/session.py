"""The session: the interface between the training call and the run around it."""

import atexit
import sys
import weakref
from collections.abc import Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.allocations import StoredCheckpoint
from resile_shared.messages.reports import BatchStep

from .changes import ChangeRecorder
from .collectives.exchange import Exchange, ExchangeRound
from .collectives.poller import LinkPoller
from .collectives.round import LinkRounds
from .collectives.spec import Abandoned, RoundSpec, Tag
from .hash_order import unfixed_order
from .hints import hint_about_gradients, hint_about_shared_memory
from .lone_training import check_not_started_several_times
from .membership.events import Switch
from .messages import Completed, Message, Progress, Ready, Warned
from .phases import Phases
from .state.run import Handover, RunState

LEFT_EARLY = (
    "the training call was left before its end: to end training early, call stop() of its loop instead of raising an "
    "error, on all workers in the same iteration, and let the call go on to its end"
)


class SecondTrainingCall(UsageError):
    """A script made a second training call."""

    def __init__(self) -> None:
        super().__init__(
            "training was called a second time: a script has one training call; raise `epochs` to train longer"
        )


class StateLost(ResileError):
    """The members that had the state were lost while they transferred it to the others."""

    def __init__(self) -> None:
        super().__init__("no worker has the complete state any more: the job can only continue from a checkpoint")


@dataclass(frozen=True)
class View:
    """A generation as one of its members sees it."""

    generation: int
    workers: tuple[int, ...]
    me: int
    lineage: int = 1
    """The number of the cold start that the generation descends from."""
    batch_size: int | None = None
    """The global batch of the generation's iterations; None for that of the last committed iteration."""
    num_hosts: int = 1

    @property
    def rank(self) -> int:
        """This worker's place in the generation."""
        return self.workers.index(self.me)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.workers)


class PreparedLoop(Protocol):
    """A loop in the script itself, prepared or hand-written.

    Leaving it ends the run if all workers leave it after the same iteration.
    """

    @property
    def missing_gradients(self) -> str:
        """Why parameters have no gradients in the current batch, and what to do; empty if they may have some."""

    def complete_if_left(self) -> None:
        """The script goes on: complete the run if the script has left the loop at a point where all workers can."""

    def complete(self) -> None:
        """The script has ended: complete the run. Raises UsageError if it has left the loop within an iteration."""


class Session(Protocol):
    """One worker's membership in a run."""

    prepared: PreparedLoop | None
    """The loop that trains, if it is in the script itself and not in a library."""
    failure: ResileError | None
    """Why training ended early, even if the script has caught the error."""

    @property
    def view(self) -> View:
        """The current generation."""

    @property
    def phases(self) -> Phases:
        """The phase that the training loop is in, kept up to date by the loop."""

    @property
    def changes(self) -> ChangeRecorder:
        """What this worker does around changes, for their traces."""

    @property
    def storage(self) -> str | None:
        """URL of the run's folder in object storage; None where there is none."""

    @property
    def job(self) -> str:
        """Id of the job."""

    @property
    def packages(self) -> str:
        """The versions of what the job's environment has over the pool's own packages."""

    @property
    def caveats(self) -> Sequence[str]:
        """What the bits of the run depend on beside its code, data and seed; empty: nothing that is known."""

    @property
    def known_probes(self) -> Path | None:
        """The folder in which the job's workers on this host share the outcome of the probe step, if any."""

    @property
    def resume(self) -> bool:
        """After `join`, for an initial member: whether to look for a checkpoint in storage."""

    @property
    def stored_checkpoint(self) -> StoredCheckpoint | None:
        """After `join`, for an initial member: a checkpoint that is known to be in storage, None if none is."""

    @property
    def expected(self) -> View | None:
        """Before `join`: the generation that this worker will join. None for an initial member, or while unknown."""

    @property
    def pause_asked(self) -> bool:
        """Whether the agent asked the job to save a checkpoint and stop training."""

    @property
    def batches(self) -> Sequence[BatchStep]:
        """The batches of another run that this one replays; empty: none."""

    def join(self, ready: Ready, state: RunState) -> bool:
        """Become a member. True for an initial member; False for a joiner, whose ``state`` is then that of a member."""

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        """Open the next round."""

    def agree_on_carrier(self, tag: Tag) -> bool:
        """Before the first sums of a generation: agree with the others in round ``tag`` on what carries them.

        False if there is nothing to agree on, and no such round took place.
        """

    def named(self, next_iteration: int, *, can_pause: bool = False) -> int:
        """The generation to name in the header of the round before ``next_iteration``; waits if an order says so.

        With ``can_pause`` it stops waiting when the agent asks for a pause.
        """

    def has_change(self, next_iteration: int) -> bool:
        """Whether there is something to agree on before ``next_iteration``: another generation, or a pause."""

    def is_member_of(self, generation: int) -> bool:
        """Whether this worker continues in ``generation``, which `named` has returned."""

    def agreed(self, named: Sequence[int]) -> Switch | None:
        """Return the switch of generations that the headers of a round agree on, if any; ``named`` is by rank."""

    def switch(self, switch: Switch, tag: Tag, state: RunState) -> None:
        """Carry out ``switch`` after round ``tag``: confirm it, hand the state over. Does not return on a leaver."""

    def report(self, message: Message) -> None:
        """Send a message to the agent."""

    def complete(self) -> None:
        """Training is complete on this member."""

    def recover(self, lost: Abandoned, *, next_round: int, state: Handover) -> bool:
        """After an abandoned round: become a member of a generation without the lost member.

        ``next_round``: all rounds before it are committed here. Returns True if others were further ahead,
        and this worker has received their state.
        """


class SoloSession:
    """A plain ``python train.py``: a run of one member, without an agent."""

    view = View(generation=1, workers=(0,), me=0)
    expected = None
    pause_asked = False
    storage = None
    resume = False
    stored_checkpoint = None
    batches = ()
    job = "local"
    packages = ""
    known_probes = None

    def __init__(self) -> None:
        self.phases = Phases()
        self.failure: ResileError | None = None
        self.prepared: PreparedLoop | None = None
        self.changes = ChangeRecorder()
        self.caveats = unfixed_order()
        poller = LinkPoller()
        self._exchange = Exchange(poller, LinkRounds(poller, worker=0))
        self._joined = False
        self._has_completed = False

    def join(self, ready: Ready, state: RunState) -> bool:
        """Start the run. Raises SecondTrainingCall, or StartedSeveralTimes."""
        if self._joined:
            raise SecondTrainingCall
        check_not_started_several_times()
        self._joined = True
        _joined_solo.add(self)
        return True

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        """Open a round without other members."""
        return self._exchange.begin(spec)

    def agree_on_carrier(self, tag: Tag) -> bool:
        """There is nothing to agree on."""
        return False

    def named(self, next_iteration: int, *, can_pause: bool = False) -> int:
        """The generation never changes."""
        return self.view.generation

    def has_change(self, next_iteration: int) -> bool:
        """Nothing ever changes."""
        return False

    def is_member_of(self, generation: int) -> bool:
        """The generation never changes."""
        return True

    def agreed(self, named: Sequence[int]) -> Switch | None:
        """Nothing ever changes."""
        return None

    def switch(self, switch: Switch, tag: Tag, state: RunState) -> None:
        """Never called: nothing ever changes."""
        raise AssertionError("a plain run has one generation")

    def report(self, message: Message) -> None:
        """Print the end of each epoch and of the run on stderr, since there is no agent to show it."""
        if isinstance(message, Progress) and message.ends_epoch:
            scores = {
                "loss": message.loss,
                **message.metrics,
                **{f"validation {k}": v for k, v in message.validation.items()},
            }
            text = ", ".join(f"{name} {value:.4f}" for name, value in scores.items() if value is not None)
            place = f"epoch {message.epoch + 1}: iteration {message.iteration}"
            print(f"{place}, {text}" if text else place, file=sys.stderr)
        elif isinstance(message, Warned):
            print(f"warning: {message.message}", file=sys.stderr)
        elif isinstance(message, Completed):
            self._has_completed = True
            caveat = f", {message.bits}" if self.caveats else ""
            print(f"completed: params_sha256 {message.params_sha256}{caveat}", file=sys.stderr)

    def on_script_end(self) -> None:
        """The script has ended: complete training, or print why that is impossible; after an error, print a hint."""
        if (error := getattr(sys, "last_value", None)) is not None:
            of_loop = hint_about_gradients(error, self.prepared) if self.prepared is not None else ""
            if hint := of_loop or hint_about_shared_memory(error):
                print(hint, file=sys.stderr)
        elif not (self._has_completed or self.failure):
            try:
                complete_left(self)
            except ResileError as refusal:
                print(f"{refusal}. With several workers this is an error", file=sys.stderr)

    def complete(self) -> None:
        """Nothing to do."""

    def recover(self, lost: Abandoned, *, next_round: int, state: Handover) -> bool:
        """Never called: there is no other member to lose."""
        raise lost


def complete_left(session: Session) -> None:
    """The script has ended before training was complete: complete it. Raises UsageError if that is impossible."""
    if session.prepared is None:
        raise UsageError(LEFT_EARLY)
    session.prepared.complete()


Yielded = TypeVar("Yielded")
_joined_solo: WeakSet[SoloSession] = WeakSet()
_held: list["weakref.ref[Generator[Any, None, None]]"] = []


def closed_at_exit(generator: Generator[Yielded, None, None]) -> Generator[Yielded, None, None]:
    """Return ``generator``, to be closed at the end of a plain run: the traceback of an error may hold it until then.

    Once the interpreter has removed modules, it could not end in order.
    """
    _held[:] = [held for held in _held if held() is not None]
    _held.append(weakref.ref(generator))
    return generator


@atexit.register
def _on_script_end() -> None:
    for session in _joined_solo:
        session.on_script_end()
    for held in reversed(_held) if _joined_solo else ():
        if (generator := held()) is not None:
            generator.close()


_session: ContextVar[Session | None] = ContextVar("resile_session", default=None)


def current_session() -> Session:
    """The session that this process was started in; a `SoloSession` in a plain run."""
    session = _session.get()
    if session is None:
        session = SoloSession()
        enter_session(session)
    return session


def enter_session(session: Session) -> None:
    """Make ``session`` the one that the training call of this process finds."""
    _session.set(session)
