"""Who trains when in a local run: the decisions, without input or output.

Events go in through `Director.handle`, commands come out; the launcher carries them out. The rules:

- Worker ids rise and are never used again. A worker that an order drops is never named by a later one.
- The first order founds the run with the first workers, once all of them said hello. A number of workers that is only
  a default waits until the script says how many shards there are, and is cut to that.
- As soon as a generation is in force, the next step of the plan is prepared: a shrink is ordered at once, with the
  first members; for a growth the joiners are started at once, and the order follows when all of them said hello.
- A resize is prepared at once and supersedes all that is pending: the newest wish wins. Before the founding it waits.
- A joiner that never became a member is stopped when a generation without it takes effect or training is complete.
- A stop pauses the run: its workers store a checkpoint where they are, and are stopped once it is there, or is late.
- A worker of which its peers hear nothing is killed.
- When a member ends unexpectedly the others are ordered to recover without it, and once they have, a new worker takes
  its place, unless the script is at fault (`setbacks.py`). Once training is complete one of them is enough.
"""

import hashlib
import hmac
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from resile_shared.errors import UsageError
from resile_shared.messages.hosts import WorkerExit

from ..messages import (
    CheckpointSaved,
    Completed,
    Failed,
    Finished,
    FromWorker,
    Joined,
    Left,
    Member,
    Order,
    Pause,
    PeerSuspected,
    Progress,
    Ready,
    Stop,
    Switched,
    Warned,
    WorkerListening,
)
from .events import Known, Noted, Progressed, Recorded, Rescaled, Saved, Trained
from .history import HistoryItem
from .plan import Step
from .seam import (
    Begin,
    Command,
    DeadlinePassed,
    End,
    Event,
    Exited,
    Fork,
    Garbled,
    Kill,
    Outcome,
    ResizeAsked,
    Said,
    Send,
    Show,
    StopAsked,
    StopBy,
)
from .setbacks import Setbacks

STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Origin:
    """The first numbers of a run to give out; a resumed run goes on where its earlier life stopped."""

    worker: int = 0
    generation: int = 1
    history: int = 1


@dataclass
class _Worker:
    """A worker whose process has not ended."""

    slot: int
    hello: WorkerListening | None = None
    was_member: bool = False
    is_unneeded: bool = False
    has_left: bool = False


@dataclass(frozen=True)
class _Pending:
    """A generation whose joiners have not all said hello."""

    workers: tuple[int, ...]
    not_before: int
    until: int | None
    reason: str
    is_recovery: bool = False


class Director:
    """The state of one local run and all decisions about it. What it knows can be read; only `handle` changes it.

    ``secret`` is the run's, and those of its generations are derived from it. ``is_default``: nobody asked for the size
    that ``plan`` starts with.
    """

    def __init__(
        self, job: str, plan: Sequence[Step], *, secret: str, is_default: bool = False, origin: Origin | None = None
    ) -> None:
        origin = origin or Origin()
        self._job = job
        self._secret = secret
        self._is_default = is_default
        self._steps = deque(plan)
        self._workers: dict[int, _Worker] = {}
        self._slots: dict[int, int] = {}
        self._next_worker = origin.worker
        self._next_generation = origin.generation
        self._first_number = origin.history
        self._orders: dict[int, Order] = {}
        self._reasons: dict[int, str] = {}
        self._pending: _Pending | None = None
        self._wish: int | None = None
        self._joined = 0  # the newest generation of which a member has told
        self._setbacks = Setbacks()
        self._size_before: int | None = None  # before members were lost whose places are to be taken again
        self._is_stopping = False
        self.in_force: Order | None = None
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.checkpoint: CheckpointSaved | None = None
        self.completed: Completed | None = None
        self.history: list[HistoryItem] = []
        self.outcome: Outcome | None = None

    @property
    def leader(self) -> int:
        """The worker whose output stands for all: the lowest rank."""
        order = self.in_force or self._newest
        return order.workers[0] if order else min(self._workers, default=0)

    def check_resize(self, workers: int) -> None:
        """Raise UsageError if ``workers`` can never be."""
        if workers < 1:
            raise UsageError(f"a run needs at least 1 worker, not {workers}")
        if self.ready is not None and workers > self.ready.num_shards:
            raise UsageError(f"{workers} workers are too many: {_limit(self.ready)}")

    def handle(self, event: Event, *, now: float) -> list[Command]:
        """Take ``event`` in at ``now`` (seconds since the epoch); return what is to be done about it, in order."""
        if self.outcome is not None:
            return []
        match event:
            case Begin():
                step = self._steps.popleft()
                return self._prepare(step.workers, not_before=0, reason="start")
            case Said(message):
                return self._said(message, now)
            case Garbled(problem):
                return self._fail(problem, now)
            case Exited(number, exit_):
                return self._exited(number, exit_, now)
            case ResizeAsked(workers):
                return self._resize(workers)
            case StopAsked():
                return self._stop(now)
            case DeadlinePassed():
                return self._end(Outcome("stopped"), now)

    # what workers say

    def _said(self, message: FromWorker, now: float) -> list[Command]:
        worker = self._workers[message.worker]
        match message:
            case WorkerListening():
                worker.hello = message
                return self._order()
            case Ready():
                return self._is_ready(message, now)
            case Switched():
                return self._switched(message, now)
            case Failed():
                return []  # its process ends now, and its end says it again
            case Warned(message=text):
                return self._warned(text, now)
            case _:
                return self._noted(message, worker)

    def _noted(
        self,
        message: Progress | CheckpointSaved | Completed | Left | PeerSuspected | Finished | Joined,
        worker: _Worker,
    ) -> list[Command]:
        match message:
            case Progress():
                self.progress = message
                return [Show(Progressed(message, len(self.in_force.workers) if self.in_force else 0))]
            case CheckpointSaved():
                self.checkpoint = message
                stops = self._stop_all() if message.pausing and self._is_stopping else []
                return [Show(Saved(message)), *stops]
            case Completed():
                self.completed = message
                self._pending = None
                return [Show(Trained(message)), *self._dismiss(self._outsiders())]
            case Left():
                worker.has_left = True
                return []
            case Joined(generation=generation):
                self._joined = max(self._joined, generation)
                return []
            case PeerSuspected(suspect=suspect, evidence="silence", reason=reason) if suspect in self._workers:
                return [Show(Noted(f"worker {suspect} is killed: {reason}")), Kill(suspect)]
            case PeerSuspected() | Finished():
                return []

    def _warned(self, text: str, now: float) -> list[Command]:
        """Note what the user should know; once, though several workers say it."""
        if any(item.kind == "warning" and item.reason == text for item in self.history):
            return []
        return [self._record("warning", self.progress.iteration if self.progress else 0, text, now), Show(Noted(text))]

    def _is_ready(self, ready: Ready, now: float) -> list[Command]:
        if self.ready is not None:
            differing = _difference(self.ready, ready)
            if not differing:
                return []
            return self._fail(
                f"worker {ready.worker} disagrees with worker {self.ready.worker} on {differing}: the script must make "
                "the same training call in every worker",
                now,
            )
        self.ready = ready
        most = max((step.workers for step in self._steps), default=0)
        if not self._is_default:
            most = max(most, len(self._pending.workers if self._pending else self._orders[max(self._orders)].workers))
        if most > ready.num_shards:
            return self._end(Outcome("failed", f"{most} workers are too many: {_limit(ready)}", usage=True), now)
        return [Show(Known(ready)), *self._drop_late_steps(ready), *self._order()]

    def _drop_late_steps(self, ready: Ready) -> list[Command]:
        late = [step for step in self._steps if step.iteration > ready.iterations_total]
        self._steps = deque(step for step in self._steps if step not in late)
        return [
            Show(Noted(f"step {step} of the plan has no effect: training ends at iteration {ready.iterations_total}"))
            for step in late
        ]

    def _switched(self, message: Switched, now: float) -> list[Command]:
        order = self._orders.get(message.generation)
        if order is None or order.workers != message.workers:
            return self._fail(f"worker {message.worker} reports a generation that nobody ordered", now)
        before = len(self.in_force.workers) if self.in_force else 0
        self.in_force = order
        self._orders = {generation: o for generation, o in self._orders.items() if generation >= order.generation}
        for number in order.workers:
            if number in self._workers:  # a member may have left again before this message was read
                self._workers[number].was_member = True
        return [
            self._record("allocation", message.iteration, self._reasons[order.generation], now),
            Show(Rescaled(order.generation, before, len(order.workers), message.iteration, message.pause_seconds)),
            *self._dismiss(self._superseded()),
            *self._next_step(),
        ]

    # who shall train

    def _next_step(self) -> list[Command]:
        if self._is_stopping or self._pending or self._newest is not self.in_force:
            return []
        if self._wish is not None:
            return self._resize(self._wish)
        if self._size_before is not None:
            size, self._size_before = self._size_before, None
            return self._prepare(size, not_before=0, reason="new workers take the places of those that were lost")
        if not self._steps:
            return []
        step = self._steps.popleft()
        return self._prepare(step.workers, not_before=step.iteration, reason=f"plan {step}")

    def _resize(self, workers: int) -> list[Command]:
        if self._is_stopping or self.completed:
            return []
        self._steps.clear()
        self._size_before = None
        self._wish = workers if self.in_force is None or self._is_recovering else None
        if self._wish is not None:
            return []
        return self._prepare(workers, not_before=0, reason=f"asked for {workers}")

    def _prepare(self, num_workers: int, *, not_before: int, reason: str) -> list[Command]:
        """Choose the members of the next generation and start those that are missing."""
        newest = self._newest
        members = newest.workers if newest else ()
        waiting = [w for w in self._pending.workers if w not in members] if self._pending else []
        if self.ready is not None:
            num_workers = min(num_workers, self.ready.num_shards)
        chosen = [*members, *waiting][:num_workers] if num_workers > len(members) else list(members[:num_workers])
        commands = self._dismiss(worker for worker in waiting if worker not in chosen)
        while len(chosen) < num_workers:
            chosen.append(self._next_worker)
            commands.append(self._fork())
        until = self._steps[0].iteration if self._steps else None
        self._pending = _Pending(tuple(chosen), not_before, until, reason)
        if newest and newest.workers == tuple(chosen) and newest.until is until is None and self._is_at_once(newest):
            self._pending = None  # it is so already, or will be before anything newer could be
        return [*commands, *self._order()]

    def _is_at_once(self, order: Order) -> bool:
        return order is self.in_force or order.not_before == 0

    def _fork(self) -> Command:
        number = self._next_worker
        self._next_worker += 1
        taken = {worker.slot for worker in self._workers.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._workers[number] = _Worker(slot)
        self._slots[number] = slot
        return Fork(number)

    def _order(self) -> list[Command]:
        """Give the pending order, if everybody it names can be named."""
        pending = self._pending
        if pending is None or self._is_stopping:
            return []
        is_founding = self._newest is None
        if is_founding and self._is_default:
            if self.ready is None:
                return []
            pending = _Pending(pending.workers[: self.ready.num_shards], 0, pending.until, pending.reason)
        hellos = [self._workers[worker].hello for worker in pending.workers]
        members = tuple(Member(worker=h.worker, host=h.host, port=h.port) for h in hellos if h is not None)
        if len(members) < len(hellos):
            return []
        order = Order(
            job=self._job,
            generation=self._next_generation,
            members=members,
            secret=self._secret_of(self._next_generation),
            cold_start=is_founding,
            is_recovery=pending.is_recovery,
            not_before=pending.not_before,
            until=pending.until,
        )
        self._next_generation += 1
        self._orders[order.generation] = order
        self._reasons[order.generation] = pending.reason
        self._pending = None
        surplus = self._dismiss(self._superseded()) if is_founding else []
        hearers = [number for number, worker in self._workers.items() if worker.hello and not worker.is_unneeded]
        dropped = self._drop_others(order) if order.is_recovery else []
        return [*surplus, *(Send(number, order) for number in hearers), *dropped]

    def _drop_others(self, order: Order) -> list[Command]:
        """End the joiners that ``order`` does not name; members that it does not name end by themselves."""
        commands = self._dismiss(number for number in self._outsiders() if number not in order.workers)
        for number, worker in self._workers.items():
            worker.is_unneeded = worker.is_unneeded or number not in order.workers
        return commands

    def _secret_of(self, generation: int) -> str:
        return hmac.new(self._secret.encode(), str(generation).encode(), hashlib.sha256).hexdigest()

    @property
    def _is_recovering(self) -> bool:
        newest = self._newest
        return newest is not None and newest.is_recovery and newest is not self.in_force

    @property
    def _newest(self) -> Order | None:
        return self._orders[max(self._orders)] if self._orders else None

    def _outsiders(self) -> list[int]:
        """Return the workers that were never members."""
        return [number for number, worker in self._workers.items() if not worker.was_member]

    def _superseded(self) -> list[int]:
        """Return the workers that were never members and are in nothing that may still take effect."""
        wanted = {*(self._newest.workers if self._newest else ()), *(self._pending.workers if self._pending else ())}
        return [number for number in self._outsiders() if number not in wanted]

    def _dismiss(self, numbers: Iterable[int]) -> list[Command]:
        commands: list[Command] = []
        for number in numbers:
            if not self._workers[number].is_unneeded:
                self._workers[number].is_unneeded = True
                commands.append(Send(number, Stop()))
        return commands

    # how it ends

    def _stop(self, now: float) -> list[Command]:
        if self._is_stopping or self.in_force is None:
            return self._end(Outcome("stopped"), now)
        self._is_stopping = True
        if self.completed:
            return [*self._stop_all(), StopBy(STOP_SECONDS)]
        pause = Pause(generation=self.in_force.generation)
        return [*(Send(number, pause) for number in self._workers), StopBy(STOP_SECONDS)]

    def _stop_all(self) -> list[Command]:
        return [Send(number, Stop()) for number in self._workers]

    def _exited(self, number: int, exit_: WorkerExit, now: float) -> list[Command]:
        worker = self._workers.pop(number)
        if self._is_stopping:
            return [] if self._workers else self._end(Outcome("stopped"), now)
        expected = exit_.kind in ("finished", "left") or worker.is_unneeded or self._may_go(number, worker)
        if not expected or self._is_awaited(number):
            return self._lost(number, exit_, now, was_member=worker.was_member)
        members = self.in_force.workers if self.in_force else ()
        if any(member in self._workers for member in members):
            return []
        if self.completed is not None:
            return self._end(Outcome("completed"), now)
        return [] if self._workers else self._fail("every worker ended, but none reported a result", now)

    def _is_awaited(self, number: int) -> bool:
        """Whether others wait for this worker to become level with them."""
        newest = self._newest
        return newest is not None and self._is_recovering and number in newest.workers and self.completed is None

    def _lost(self, number: int, exit_: WorkerExit, now: float, *, was_member: bool) -> list[Command]:
        """Have the members that are left go on without the one that has ended, if that can be."""
        description = exit_.describe(f"worker {number}")
        is_training = self.in_force is not None and self.completed is None
        iteration = self.progress.iteration if self.progress else 0
        if self._setbacks.ends_run(exit_, iteration=iteration, is_training=is_training, was_member=was_member):
            return self._fail(description, now, exit_.details)
        if self._pending and not any(number in order.workers for order in self._orders.values()):
            return self._replace_joiner(number, self._pending)
        survivors = self._survivors()
        if not survivors:
            return self._fail(description, now, exit_.details)
        if not self._is_recovering:
            self._size_before = self._size_to_restore()
        until = self._steps[0].iteration if self._steps else None
        self._pending = _Pending(survivors, 0, until, description, is_recovery=True)
        note = f"{description}; the others go on"
        return [Show(Noted("\n".join(filter(None, (note, exit_.details.rstrip()))))), *self._order()]

    def _survivors(self) -> tuple[int, ...]:
        """Those of the generation in force who go on: whoever is in the newest too, if there is one of them."""
        force = self.in_force
        if self._joined in self._orders and (force is None or self._joined > force.generation):
            force = self._orders[self._joined]  # whoever was to report it may have been lost first
        alive = [n for n in (force.workers if force else ()) if n in self._workers and not self._workers[n].has_left]
        newest = self._newest.workers if self._newest else ()
        survivors = [number for number in alive if number in newest] or alive
        return tuple(survivors[:1] if self.completed else survivors)

    def _size_to_restore(self) -> int:
        """How many there shall be once the others have recovered. A step of the plan that has not come is put back."""
        sizes = [self._size_before or 0, len(self.in_force.workers) if self.in_force else 0]
        for shape in (self._newest if self._newest is not self.in_force else None, self._pending):
            if shape is not None and shape.not_before:
                self._steps.appendleft(Step(shape.not_before, len(shape.workers)))
            elif shape is not None:
                sizes = [len(shape.workers)]
        return max(sizes)

    def _replace_joiner(self, lost: int, pending: _Pending) -> list[Command]:
        """A joiner that was lost before anybody counted on it leaves a place for another."""
        left = tuple(worker for worker in pending.workers if worker != lost)
        self._pending = replace(pending, workers=left)
        return self._prepare(len(pending.workers), not_before=pending.not_before, reason=pending.reason)

    def _may_go(self, number: int, worker: _Worker) -> bool:
        """Tell whether the run needs this worker no more, whether or not it was told so yet."""
        if worker.has_left:
            return True
        orders = (self.in_force, self._newest)
        named = any(number in order.workers for order in orders if order)
        return self.in_force is not None and not named and not (self._pending and number in self._pending.workers)

    def _fail(self, error: str, now: float, details: str = "") -> list[Command]:
        """End the run. A loss that surviving members could make up for comes through here as well."""
        if self._is_stopping:
            return []  # those who stop later may well miss those who stopped before
        if self.completed is not None:
            error = f"{error}, after training was complete"
        return self._end(Outcome("failed", error, details), now)

    def _end(self, outcome: Outcome, now: float) -> list[Command]:
        self.outcome = outcome
        iteration = self.completed.iteration if self.completed else self.progress.iteration if self.progress else 0
        return [self._record(outcome.state, iteration, outcome.error, now), End(outcome)]

    def _record(self, kind: str, iteration: int, reason: str, now: float) -> Command:
        workers = self.in_force.workers if self.in_force else ()
        item = HistoryItem(
            number=self._first_number + len(self.history),
            time=now,
            kind=kind,
            generation=self.in_force.generation if self.in_force else 0,
            workers=len(workers),
            slots=tuple(f"local/{self._slots[worker]}" for worker in workers),
            iteration=iteration,
            reason=reason,
        )
        self.history.append(item)
        return Show(Recorded(item))


def _difference(one: Ready, other: Ready) -> str:
    """Name the first thing that two training calls disagree on; empty if there is none."""
    names = ("iterations_total", "num_shards", "batch_size", "epochs", "samples")
    for name in names:
        left, right = getattr(one, name), getattr(other, name)
        if left != right:
            return f"{name.replace('_', ' ')} ({right} instead of {left})"
    return ""


def _limit(ready: Ready) -> str:
    return (
        f"a batch of {ready.batch_size} is cut into {ready.num_shards} shards, so at most {ready.num_shards} workers "
        "can share it (num_shards in the training call)"
    )
