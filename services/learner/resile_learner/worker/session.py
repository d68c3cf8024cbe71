"""One worker's part in an elastic run: the training loop's session over the mesh and the control thread."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from resile_shared.errors import ResileError

from ..collectives.exchange import Abandoned, OpenRound, RoundSpec, Tag
from ..collectives.mesh import Mesh
from ..membership import Membership, RoundDone, ScriptReady, StateReceived, Switch
from ..messages import Left, Lost, Message, Order, Ready, WorkerConfig
from ..recovery import Levelled, Levelling, Recovery, RoundLost
from ..training.session import Change, SecondTrainingCall, View
from ..training.state import Flat
from .control import Control


class WorkerSession:
    """Implements `Session` for a worker process."""

    def __init__(self, config: WorkerConfig, control: Control, mesh: Mesh) -> None:
        self._config = config
        self._control = control
        self._mesh = mesh
        self._order: Order | None = None
        self._switch: Switch | None = None
        self.training_called = False
        self.completed = False

    @property
    def view(self) -> View:
        """The current generation."""
        assert self._order is not None
        return self._view_of(self._order)

    @property
    def expected(self) -> View | None:
        """Before `join`: the generation that this worker is going to join. None for a founder, or while not known."""
        (order,) = self._control.wait_for(lambda membership: (membership.first_order,))
        return self._view_of(order) if order and not order.founding else None

    @property
    def pause_asked(self) -> bool:
        """Whether the agent said so."""
        return self._control.pause_asked

    def _view_of(self, order: Order) -> View:
        return View(order.generation, order.workers, self._config.worker)

    @property
    def storage(self) -> str | None:
        """URL of the run's folder in object storage."""
        return self._config.storage

    @property
    def job(self) -> str:
        """Id of the job."""
        return self._config.job

    @property
    def resume(self) -> bool:
        """Whether founders begin with the newest complete checkpoint."""
        return self._config.resume

    def join(self, ready: Ready, allocate: Callable[[bytes], Sequence[Tensor]]) -> bool:
        """Become a member: found the run, or wait for the state that a member hands over."""
        if self.training_called:
            raise SecondTrainingCall
        self.training_called = True
        self._control.report(ready.model_copy(update={"worker": self._config.worker}))
        self._control.post(ScriptReady())
        founding = self._control.wait_for(self._first_role)
        if founding:
            self._order = self._control.wait_for(
                lambda membership: membership.current if self._control.started else None
            )
            return True
        donor, generation = self._mesh.receive_state(allocate)
        self._control.post(StateReceived(generation))
        self._order = self._control.wait_for(lambda membership: membership.current)
        if donor not in self._order.workers:
            self._mesh.confirm(donor, Tag(generation, 0, 0))
        return False

    @staticmethod
    def _first_role(membership: Membership) -> bool | None:
        if membership.current is not None:
            return True
        first = membership.first_order
        return first.founding if first else None

    def begin(self, spec: RoundSpec) -> OpenRound:
        """Open the next round."""
        return self._mesh.begin(spec)

    def named(self, next_iteration: int) -> int:
        """The generation to name in the header of the round before ``next_iteration``; waits where a plan says so."""

        def answer(membership: Membership) -> int | None:
            return None if membership.must_wait(next_iteration) else membership.named(next_iteration)

        return self._control.wait_for(answer)

    def agreed(self, named: Sequence[int]) -> Change | None:
        """Take the names of all headers of a round; tell what all members thereby agreed on."""
        if all(generation == self.view.generation for generation in named):
            return None
        switch = self._control.post(RoundDone(tuple(named)))
        if switch is None:
            return None
        self._switch = switch
        receivers = switch.receivers_of(self._config.worker)
        return Change(self.view, switch.new.workers, switch.new.generation, receivers)

    def switch(self, change: Change, tag: Tag, flatten: Callable[[], Flat]) -> None:
        """Carry out ``change`` after round ``tag``: confirm, hand the state over; a leaver does not return."""
        assert self._switch is not None
        me, switch = self._config.worker, self._switch
        for leaver in switch.leavers:
            if leaver != me:
                self._mesh.confirm(leaver, tag)
        if change.receivers:
            flat = flatten()
            for joiner in change.receivers:
                with suppress(Abandoned):  # it was lost on the way in: the next round will show it
                    self._mesh.send_state(joiner, change.new_generation, flat.skeleton, flat.tensors)
        if change.leaves:
            self._let_go(change, tag)
        self._order = switch.new

    def _let_go(self, change: Change, tag: Tag) -> NoReturn:
        self._mesh.await_confirms(change.receivers, Tag(change.new_generation, 0, 0))
        others = [worker for worker in change.old.workers if worker != change.old.me]
        self._mesh.await_confirms(others, tag)
        self._control.report(Left(worker=change.old.me, generation=change.old.generation, iteration=tag.round))
        self._control.close_links()
        self._mesh.let_go([*others, *change.receivers])
        leave_process(self._control, status=0)

    def recover(
        self,
        lost: Abandoned,
        *,
        standing: tuple[int, int],
        flatten: Callable[[], Flat],
        allocate: Callable[[bytes], Sequence[Tensor]],
    ) -> bool:
        """Wait for a generation without whoever was lost, and become level with its members."""
        number, iteration = standing
        begun: list[bytes] = []

        def make_room(skeleton: bytes) -> Sequence[Tensor]:
            begun.append(skeleton)
            return allocate(skeleton)

        while True:
            self._accuse(lost, iteration)
            self._control.post(RoundLost(number))
            recovery = self._await_recovery()
            try:
                self._level(recovery, flatten, make_room)
                number = max(recovery.standings.values())
                self._control.post(Levelled(recovery.order.generation, number))
            except Abandoned as error:
                lost = error
                number = -1 if begun and recovery.donor_of(self.view.me) is not None else number
            current = self._control.ask(lambda membership: membership.current)
            if current is not None and current.generation == recovery.order.generation:
                self._order = current
                return bool(begun)

    def _accuse(self, lost: Abandoned, iteration: int) -> None:
        view = self.view
        accusation = Lost(
            worker=view.me, generation=view.generation, suspect=lost.suspect, reason=lost.reason, iteration=iteration
        )
        self._control.report(accusation)

    def _await_recovery(self) -> Recovery:
        """Wait until it is known how the next generation begins; what is left to be sent goes out meanwhile."""
        self._mesh.wait_until(lambda: self._control.ask(lambda membership: membership.recovery is not None))
        recovery = self._control.ask(lambda membership: membership.recovery)
        if recovery is None:  # a newer one was ordered just now
            return self._await_recovery()
        self._control.post(Levelling())
        return recovery

    def _level(
        self, recovery: Recovery, flatten: Callable[[], Flat], allocate: Callable[[bytes], Sequence[Tensor]]
    ) -> None:
        """Give or take the state, as it stands with the members. Raises Abandoned."""
        generation = recovery.order.generation
        if max(recovery.standings.values()) < 0:
            raise ResileError("no member has a whole state any more: the job can only go on from a checkpoint")

        def obsolete() -> bool:
            return self._control.ask(lambda membership: membership.is_superseded(generation))

        me = self._config.worker
        donor = recovery.donor_of(me)
        if donor is not None:
            self._mesh.receive_state(allocate, generation=generation, donor=donor, obsolete=obsolete)
            return
        receivers = recovery.receivers_of(me)
        if receivers:
            flat = flatten()
            for receiver in receivers:
                self._mesh.send_state(receiver, generation, flat.skeleton, flat.tensors, obsolete=obsolete)

    def report(self, message: Message) -> None:
        """Tell the agent."""
        self._control.report(message)

    def complete(self) -> None:
        """Training is over on this member, as asked."""
        self.completed = True


def leave_process(control: Control, *, status: int) -> NoReturn:
    """End the process without returning to the user's script, whatever it would catch; what was printed is not lost."""
    control.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
