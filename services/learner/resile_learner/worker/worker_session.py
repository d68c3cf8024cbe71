"""One worker's part in an elastic run: the training loop's session over its links and its control."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from resile_shared.errors import ResileError
from resile_shared.messages.allocations import StoredCheckpoint

from ..changes import ChangeRecorder
from ..collectives.departure import LeaveAcknowledgement
from ..collectives.device.communicators import exchange_device
from ..collectives.exchange import Exchange, ExchangeRound
from ..collectives.memory_agreement import MemoryAgreement
from ..collectives.poller import LinkPoller
from ..collectives.round import LinkRounds
from ..collectives.spec import Abandoned, OtherRound, RoundSpec, Tag
from ..collectives.state_transfer import StateTransfer
from ..collectives.status import find_host, rack_of
from ..membership.events import (
    RoundAbandoned,
    RoundCompleted,
    ScriptReady,
    StateReceived,
    StateSynced,
    StateSyncRequested,
    Switch,
    SyncState,
)
from ..membership.view import MembershipView
from ..messages import ChangeTraced, Imported, Left, Message, Order, Ready, Trained, Warned, WorkerConfig
from ..session import PreparedLoop, SecondTrainingCall, StateLost, View
from ..state.flat import FlatState
from ..state.run import Handover, NoState, RunState
from .control import Withdrawn, WorkerControl

NO_STATE = -1


class WorkerSession:
    """Implements `Session` for a worker process, which ``leave`` ends; ``imported`` says what its script imported."""

    def __init__(
        self,
        config: WorkerConfig,
        control: WorkerControl,
        poller: LinkPoller,
        *,
        leave: Callable[[], NoReturn],
        imported: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._config = config
        self._control = control
        self._poller = poller
        self._leave_process = leave
        self._imported = imported
        self._agreement = MemoryAgreement(
            config.worker, host=find_host(), rack=rack_of(config.location), report=self._warn
        )
        self._communicators = control.communicators
        self._exchange = Exchange(
            poller,
            LinkRounds(poller, config.worker, self._agreement),
            self._communicators,
            report=self._warn,
        )
        self._state_transfer = StateTransfer(poller, config.worker)
        self._leave_acknowledgement = LeaveAcknowledgement(poller)
        self._order: Order | None = None
        self.phases = control.phases
        self.changes = ChangeRecorder()
        self.storage = config.storage
        self.job = config.job
        self.packages = config.packages
        self.caveats = [f"changed {what}" for what in config.code.changed] if config.code else []
        self.known_probes = _probes_of(config)
        self.batches = config.batches
        self.failure: ResileError | None = None
        self.prepared: PreparedLoop | None = None
        self.training_called = False
        self.completed = False

    @property
    def view(self) -> View:
        """The current generation."""
        assert self._order is not None
        return self._view_of(self._order)

    @property
    def num_workers(self) -> int:
        """The size of the current generation; 0 before `join`."""
        return len(self._order.workers) if self._order else 0

    @property
    def expected(self) -> View | None:
        """Before `join`: the generation that this worker is going to join. None at a cold start, or while not known."""
        order = self._control.view.first_order
        return self._view_of(order) if order and not order.cold_start else None

    @property
    def resume(self) -> bool:
        """Whether the cold start that this worker is an initial member of looks for a checkpoint."""
        assert self._order is not None
        return self._order.resume

    @property
    def stored_checkpoint(self) -> StoredCheckpoint | None:
        """The newest checkpoint that the job has reported as stored, if its members look for one."""
        assert self._order is not None
        return self._order.checkpoint

    @property
    def pause_asked(self) -> bool:
        """Whether the agent has requested a pause."""
        return self._control.view.is_pause_requested

    def _view_of(self, order: Order) -> View:
        return View(
            order.generation, order.workers, self._config.worker, order.lineage, order.batch_size, order.num_hosts
        )

    def join(self, ready: Ready, state: RunState) -> bool:
        """Become a member: one of the initial members, or one that receives the state of another."""
        if self.training_called:
            raise SecondTrainingCall
        self.training_called = True
        if imported := tuple(self._imported()):
            self._control.report(Imported(worker=self._config.worker, modules=imported))
        if device := exchange_device(state.devices, os.environ):
            self._communicators.enable(device)
        self._prewarm_exchange(state)
        self._control.report(ready.model_copy(update={"worker": self._config.worker}))
        self._control.post(ScriptReady())
        with self.changes.step("wait for membership"):
            is_initial = self._control.wait_for(_is_initial_member)
        if is_initial:
            self._order = self._control.view.current
            return True
        try:
            with self.changes.step("receive state"):
                origin = self._state_transfer.receive(
                    state.allocate_buffers, obsolete=lambda: self._control.view.must_recover
                )
        except Abandoned as lost:
            try:
                self._catch_up(lost.suspect, NO_STATE, state)
            except NoState:
                raise Withdrawn from None  # another worker joins when that body has ended
            return False
        with self.changes.step("load state"):
            state.load_received()
        generation = origin.generation
        self._control.post(StateReceived(generation))
        self._order = self._control.wait_for(lambda view: view.current)
        self._agreement.continue_in(generation, self._order.workers, origin.groups)
        for peer in self._poller.links.keys() - set(self._order.workers):  # leavers wait for it where nobody continues
            self._leave_acknowledgement.confirm(peer, Tag(generation, 0))
        return False

    def _prewarm_exchange(self, state: RunState) -> None:
        """As a joiner: make the memory that is shared on this host while the others still train without this worker."""
        order = self._control.view.first_order
        if order is None or order.cold_start:
            return
        neighbors = [member for member in order.members if member.host == self._config.host]
        if len(neighbors) > 1:
            self._agreement.prewarm(num_bytes=sum(tensor.nbytes for tensor in state.model_memory()))

    def begin(self, spec: RoundSpec) -> ExchangeRound:
        """Open the next round."""
        return self._exchange.begin(spec)

    def agree_on_carrier(self, tag: Tag) -> bool:
        """Before the first sums of a generation: find out in round ``tag`` whether all members' devices are connected.

        Waits until this worker's are, or cannot be. False if there is nothing to agree on: no such round took place.
        """
        key = tag.generation, self.view.workers
        if not self._exchange.needs_agreement(key):
            return False
        self.phases.enter("waiting")
        self._poller.wait_until(
            lambda: self._communicators.is_settled(tag.generation) or self._control.view.must_recover
        )
        others = self.begin(RoundSpec(tag, self.view.workers, ((),) * self.view.size, 0, (), ())).finish(b"")
        if any(others):
            raise OtherRound("another worker")
        return True

    def named(self, next_iteration: int, *, can_pause: bool = False) -> int:
        """The generation to name in the header of the round before ``next_iteration``; waits where a plan says so.

        If it ``can_pause``, a request to pause ends the wait: the iteration is not trained before the pause is over.
        """

        def answer(view: MembershipView) -> int | None:
            settled = tuple(order for order in view.formed if self._communicators.is_settled(order.generation))
            view = replace(view, formed=settled)
            waits = view.must_wait(next_iteration) and not (can_pause and view.is_pause_requested)
            return None if waits else view.named(next_iteration)

        return self._control.wait_for(answer)

    def has_change(self, next_iteration: int) -> bool:
        """Whether there is something to agree on before ``next_iteration``: another generation, or a pause."""
        view = self._control.view
        return (
            view.is_pause_requested
            or view.must_wait(next_iteration)
            or view.named(next_iteration) != self.view.generation
        )

    def is_member_of(self, generation: int) -> bool:
        """Whether this worker trains on in ``generation``, which `named` has returned."""
        return self._control.view.is_member_of(generation)

    def agreed(self, named: Sequence[int]) -> Switch | None:
        """Return the switch that all members agreed on, given the generation that each header of a round names."""
        if all(generation == self.view.generation for generation in named):
            return None
        switch = self._control.post(RoundCompleted(tuple(named)))
        return switch if isinstance(switch, Switch) else None

    def switch(self, switch: Switch, tag: Tag, state: RunState) -> None:
        """Carry out ``switch`` after round ``tag``: confirm, hand the state over; a leaver does not return."""
        me, generation = self._config.worker, switch.new.generation
        for leaver in switch.leavers:
            if leaver != me:
                self._leave_acknowledgement.confirm(leaver, tag)

        def is_superseded() -> bool:
            return self._control.view.is_superseded(generation)

        receivers, groups = switch.receivers_of(me), self._agreement.groups
        if receivers:
            flat = state.flatten()
            for joiner in receivers:
                # One that was lost on the way in shows in the next round.
                with suppress(Abandoned), self.changes.step("send state", to=joiner):
                    self._state_transfer.send(
                        joiner, generation, flat.skeleton, flat.tensors, groups=groups, obsolete=is_superseded
                    )
        if me not in switch.new.workers:
            self._await_heirs_and_leave(switch, tag, iteration=state.progress.iteration)
        self._agreement.continue_in(generation, switch.new.workers, groups)
        self._order = switch.new

    def _await_heirs_and_leave(self, switch: Switch, tag: Tag, *, iteration: int) -> NoReturn:
        """Leave once a member that continues is known to have all that this worker has. Raises Abandoned if none is."""
        self._agreement.close()  # others may write to what they share once this worker has read it
        others = [worker for worker in switch.old.workers if worker != self._config.worker]
        with self.changes.step("wait until others have the state"):
            self._await_heirs(switch, tag, others)
        self._leave([*others, *switch.joiners], iteration, successor=switch.new.generation)

    def _await_heirs(self, switch: Switch, tag: Tag, others: Sequence[int]) -> None:
        def is_recalled() -> bool:
            view = self._control.view
            return view.is_released or view.must_recover

        confirmed = self._leave_acknowledgement.await_confirmations(others, tag, obsolete=is_recalled)
        if not switch.continuing:
            confirmed = self._leave_acknowledgement.await_confirmations(
                switch.joiners, Tag(switch.new.generation, 0), obsolete=is_recalled
            )
        heirs = switch.continuing or switch.joiners
        is_needed = is_recalled() or not confirmed.intersection(heirs)
        if is_needed and not self._control.view.is_released:
            raise Abandoned(heirs[0], "it was lost before it was known to have what this worker has")

    def _leave(self, peers: Sequence[int], iteration: int, *, successor: int | None = None) -> NoReturn:
        me, generation = self._config.worker, self.view.generation
        self.changes.flush(
            lambda spans: self._control.report(
                ChangeTraced(worker=me, generation=successor or generation, change="generation", spans=spans)
            )
        )
        self._control.report(Left(worker=me, generation=generation, iteration=iteration))
        self._control.close_links()
        self._leave_acknowledgement.close_gracefully(peers)
        self._leave_process()

    def leave_together(self) -> NoReturn:
        """Leave, as all members do after the same round."""
        self._control.complete()
        self._leave(sorted(self._poller.links), 0)

    def recover(self, lost: Abandoned, *, next_round: int, state: Handover) -> bool:
        """Wait for a generation without the lost worker, and synchronize the state with its members."""
        self._control.report_suspect(lost.suspect, "hearsay" if lost.is_hearsay else "broken link", lost.reason)
        return self._catch_up(lost.suspect, next_round, state)

    def _catch_up(self, suspect: int, number: int, state: Handover) -> bool:
        """Become a member by a recovery; return whether that took the state of another member.

        Until it has all of that, this worker keeps the state before round ``number``: if those ahead are lost, it is
        the one to continue from.
        """
        has_taken = False

        def allocate_buffers(skeleton: bytes) -> Sequence[Tensor]:
            return state.allocate_buffers(skeleton, keeps_state=number != NO_STATE)

        while True:
            self._control.check_link(suspect)
            self._control.post(RoundAbandoned(number))
            with self.changes.step("wait for the recovery"):
                sync = self._await_state_sync(state.progress.iteration)
            try:
                with self.changes.step("synchronize state", round=sync.round):
                    has_received = self._sync_state(sync, state.flatten, allocate_buffers)
                if has_received:
                    state.load_received()  # before anything newer can make this worker a donor
                    has_taken = True
                number = sync.round
                self._control.post(StateSynced(sync.order.generation, number))
            except Abandoned as lost:
                suspect = lost.suspect
                state.drop_received()
            current = self._control.view.current
            if current is not None and current.generation == sync.order.generation:
                self._order = current
                return has_taken

    def _await_state_sync(self, iteration: int) -> SyncState:
        """Wait until the state sync of a recovery can start; what is left to be sent goes out meanwhile."""
        while True:
            self._poller.wait_until(lambda: self._control.view.is_released or self._control.view.can_sync_state)
            if self._control.view.is_released:
                self._leave(sorted(self._poller.links), iteration)
            sync = self._control.post(StateSyncRequested())
            if isinstance(sync, SyncState):
                return sync

    def _sync_state(
        self, sync: SyncState, flatten: Callable[[], FlatState], allocate: Callable[[bytes], Sequence[Tensor]]
    ) -> bool:
        """Send or receive the state, depending on who is ahead; True if it was received. Raises Abandoned."""
        generation = sync.order.generation
        if sync.round < 0:
            raise StateLost

        def obsolete() -> bool:
            return self._control.view.is_superseded(generation)

        me = self._config.worker
        donor = sync.donor_of(me)
        if donor is not None:
            self._state_transfer.receive(allocate, generation=generation, donor=donor, obsolete=obsolete)
            return True
        receivers = sync.receivers_of(me)
        if receivers:
            flat = flatten()
            for receiver in receivers:
                self._state_transfer.send(receiver, generation, flat.skeleton, flat.tensors, obsolete=obsolete)
        return False

    def close(self) -> None:
        """Release the memory that is shared with other workers, and the connections of devices."""
        self._agreement.close()
        self._communicators.close()

    def report(self, message: Message) -> None:
        """Send ``message`` to the agent."""
        self._control.report(message)

    def _warn(self, text: str) -> None:
        self._control.report(Warned(worker=self._config.worker, message=text))

    def complete(self) -> None:
        """Training has ended on this member, as requested. Its agent knows it by then, however the script ends."""
        self.completed = True
        self._control.complete()
        self._control.report(Trained(worker=self._config.worker))
        self._control.flush()


def _is_initial_member(view: MembershipView) -> bool | None:
    """Whether this worker starts the run with a state of its own; None while that is not known."""
    if view.current is not None:
        return True
    first = view.first_order
    return False if view.must_recover or (first and not first.cold_start) else None


def _probes_of(config: WorkerConfig) -> Path | None:
    """The folder for outcomes of the probe step; None where it cannot be made."""
    if config.shared_folder is None:
        return None
    folder = Path(config.shared_folder) / "probes" / config.job
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder
