"""What a change of membership costs in messages between workers, for jobs of up to a thousand of them."""

from collections import deque
from collections.abc import Callable, Iterable

import pytest

from resile_learner.membership.events import (
    Connect,
    Event,
    LinkDown,
    LinkUp,
    OrderReceived,
    RoundAbandoned,
    RoundCompleted,
    ScriptReady,
    SendToPeer,
    StateReceived,
    StateSynced,
    StateSyncRequested,
    SyncState,
)
from resile_learner.membership.machine import Membership
from resile_learner.messages import Heartbeat, Order, encode

from .membership_world import order, received

NUM_CUT_OFF = 8
MESSAGES_PER_WORKER = 4
BYTES_PER_WORKER = 300
Change = Callable[["Job"], Order]


class Job:
    """The members of generation 1, all linked, in memory. Messages arrive at once; they are counted."""

    def __init__(self, num_members: int) -> None:
        self.current = order(1, *range(num_members))
        self.machines = {worker: Membership(worker) for worker in self.current.workers}
        self.num_messages = self.num_bytes = 0
        self._waiting: deque[tuple[int, Event]] = deque()
        for worker, machine in self.machines.items():
            for peer in self.machines:
                if peer != worker:
                    machine.handle(LinkUp(peer))
        self.agents_send(self.current)
        self.everywhere(ScriptReady())
        self.num_messages = self.num_bytes = 0

    def post(self, worker: int, event: Event) -> None:
        self._waiting.append((worker, event))
        while self._waiting:
            receiver, waiting = self._waiting.popleft()
            if receiver in self.machines:
                for command in self.machines[receiver].handle(waiting):
                    if isinstance(command, SendToPeer):
                        self._send(receiver, command)
                    elif isinstance(command, Connect):
                        self._waiting.append((receiver, LinkUp(command.member.worker)))
                        self._waiting.append((command.member.worker, LinkUp(receiver)))

    def _send(self, sender: int, command: SendToPeer) -> None:
        self.num_messages += 1
        self.num_bytes += len(encode(command.message))
        self._waiting.append((command.peer, received(sender, command.message)))

    def everywhere(self, event: Event) -> None:
        for worker in list(self.machines):
            self.post(worker, event)

    def agents_send(self, new: Order, *, but: Iterable[int] = ()) -> None:
        for worker in set(self.machines) - set(but):
            self.post(worker, OrderReceived(new))

    def heartbeats_to(self, worker: int) -> None:
        for peer in list(self.machines):
            if peer != worker:
                self.post(worker, received(peer, Heartbeat(generation=self.machines[peer].view.newest)))

    def switch(self) -> None:
        """All members complete a round."""
        members = self.current.workers
        self.everywhere(RoundCompleted(tuple(self.machines[worker].view.named(1) for worker in members)))


def shrinks(job: Job) -> Order:
    new = order(2, *job.current.workers[1:])
    job.agents_send(new)
    job.switch()
    del job.machines[0]
    return new


def grows(job: Job) -> Order:
    joiner = len(job.current.workers)
    new = order(2, *job.current.workers, joiner)
    members = list(job.machines)
    job.machines[joiner] = Membership(joiner)
    job.agents_send(new)
    job.post(joiner, ScriptReady())
    for worker in members:
        job.post(worker, RoundCompleted((2,) * len(members)))
    job.post(joiner, StateReceived(2))
    return new


def recovers(job: Job) -> Order:
    del job.machines[0]
    job.everywhere(LinkDown(0))
    job.everywhere(RoundAbandoned(5))
    new = order(2, *job.current.workers[1:], is_recovery=True)
    job.agents_send(new)
    for machine in list(job.machines.values()):
        (sync,) = machine.handle(StateSyncRequested())
        assert isinstance(sync, SyncState)
        assert sync.donors == new.workers
    job.everywhere(StateSynced(2, 5))
    return new


def shrinks_while_an_agent_is_cut_off(job: Job) -> Order:
    new = order(2, *job.current.workers[1:])
    cut_off = new.workers[-NUM_CUT_OFF:]
    job.agents_send(new, but=cut_off)
    for worker in cut_off:
        job.heartbeats_to(worker)
    job.switch()
    del job.machines[0]
    return new


@pytest.mark.parametrize("change", [shrinks, grows, recovers, shrinks_while_an_agent_is_cut_off])
def test_messages_between_workers_are_linear_in_their_number(change: Change) -> None:
    for size in (10, 100):
        num_messages, num_bytes = cost(size, change)
        assert num_messages <= MESSAGES_PER_WORKER * size
        assert num_bytes <= BYTES_PER_WORKER * size + orders_lacking(change) * order_bytes(size)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "size"),
    [(shrinks, 1000), (recovers, 1000), (grows, 400), (shrinks_while_an_agent_is_cut_off, 400)],  # the others take long
)
def test_so_they_are_for_large_jobs(change: Change, size: int) -> None:
    num_messages, num_bytes = cost(size, change)
    assert num_messages <= MESSAGES_PER_WORKER * size
    assert num_bytes <= BYTES_PER_WORKER * size + orders_lacking(change) * order_bytes(size)


def orders_lacking(change: Change) -> int:
    return NUM_CUT_OFF if change is shrinks_while_an_agent_is_cut_off else 0


def order_bytes(size: int) -> int:
    return len(encode(order(1, *range(size))))


def cost(size: int, change: Change) -> tuple[int, int]:
    job = Job(size)
    new = change(job)
    assert all(job.machines[worker].view.current == new for worker in new.workers)
    print(f"{change.__name__}: {size} workers, {job.num_messages} messages, {job.num_bytes} bytes")
    return job.num_messages, job.num_bytes
