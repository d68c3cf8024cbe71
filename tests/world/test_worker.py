"""Simulated workers, given orders by hand: the worker's own code keeps the promises in virtual time."""

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from resile_learner.collectives.departure import LeaveAcknowledgement
from resile_learner.collectives.spec import Tag
from resile_learner.messages import (
    CheckpointSaved,
    Completed,
    Failed,
    Imported,
    Left,
    Member,
    Order,
    Pause,
    Ready,
    Switched,
    WorkerConfig,
    WorkerListening,
)
from resile_learner.processes.worker_process import WorkerProcess
from resile_learner.state.run import RunState
from resile_learner.training.data.batches import Batch, Indices
from resile_learner.training.reports import Reports, Result
from resile_shared.messages.hosts import WorkerExit

from .loop import Process, SimLoop
from .training import Commit, SimScript, SimTraining
from .worker import SimCluster, SimForkServer

JOB = "job-1"


class Scene:
    """One job. The test is its scheduler and its agents: it starts workers and sends them orders."""

    def __init__(self, seed: int, script: SimScript) -> None:
        self.loop = SimLoop()
        self.cluster = SimCluster(self.loop, random.Random(seed), script_of=lambda _: script)
        self.agent = Process(self.loop, "agent", host="host-1")
        self.fork_server: SimForkServer = self.agent.run(SimForkServer, self.cluster, "host-1")
        self.processes: dict[int, WorkerProcess] = {}
        self.messages: list[Any] = []
        self.exits: dict[int, WorkerExit] = {}
        self.orders: list[Order] = []

    def run(self, done: Callable[[], bool], *, seconds: float = 60.0) -> None:
        with self.cluster.surroundings():
            assert self.loop.run_until(done, limit=self.loop.now + seconds), self.messages[-5:]
        assert not self.loop.errors

    def start(self, *ids: int) -> None:
        for worker in ids:
            config = WorkerConfig(
                job=JOB,
                worker=worker,
                script="/train.py",
                directory="/",
                host="host-1",
                storage=f"sim://storage/{JOB}",
            )
            self.agent.spawn(self._follow(config))
        self.run(lambda: all(self.address(worker) for worker in ids))

    async def _follow(self, config: WorkerConfig) -> None:
        process = self.processes[config.worker] = await self.fork_server.fork(config, lambda *_: None)
        async for message in process.messages():
            self.messages.append(message)
        self.exits[config.worker] = await process.wait()

    def address(self, worker: int) -> WorkerListening | None:
        found = (m for m in self.messages if isinstance(m, WorkerListening) and m.worker == worker)
        return next(found, None)

    def order(self, *ids: int, is_recovery: bool = False, cold_start: bool = False, until: int | None = None) -> None:
        """Order the next generation, and send it to every worker that lives."""
        members = []
        for worker in ids:
            address = self.address(worker)
            assert address is not None
            members.append(Member(worker=worker, host=address.host, port=address.port))
        number = len(self.orders) + 1
        order = Order(
            job=JOB,
            generation=number,
            members=tuple(members),
            secret=f"secret-{number}",
            cold_start=cold_start or number == 1,
            is_recovery=is_recovery,
            until=until,
        )
        self.orders.append(order)
        for worker, process in self.processes.items():
            if worker not in self.exits:
                process.send(order)

    def is_active(self, generation: int) -> Callable[[], bool]:
        return lambda: any(isinstance(m, Switched) and m.generation == generation for m in self.messages)

    def has_trained(self, iteration: int) -> Callable[[], bool]:
        return lambda: any(commit.iteration >= iteration for commit in self.commits)

    @property
    def commits(self) -> list[Commit]:
        return self.cluster.commits

    @property
    def completions(self) -> list[Completed]:
        return [message for message in self.messages if isinstance(message, Completed)]

    def check_completed(self) -> None:
        """Run it to its end; the result is that of an undisturbed run, and reported once."""
        self.run(lambda: self.processes.keys() == self.exits.keys())
        (completed,) = self.completions
        assert completed.params_sha256 == SCRIPT.undisturbed()[1]
        assert [(count.once, count.more, count.never) for count in completed.ledger] == [(160, 0, 0)] * 3
        check_one_lineage(self.commits)


def grow_lose_and_shrink(seed: int, script: SimScript) -> Scene:
    scene = Scene(seed, script)
    scene.start(0, 1, 2)
    scene.order(0, 1, 2)
    scene.run(scene.has_trained(4))
    scene.start(3, 4)
    scene.order(0, 1, 2, 3, 4)
    scene.run(scene.is_active(2))
    scene.run(scene.has_trained(scene.commits[-1].iteration + 5))
    scene.processes[1].kill()
    scene.run(lambda: 1 in scene.exits)
    scene.order(0, 2, 3, 4, is_recovery=True)
    scene.run(scene.is_active(3))
    scene.run(scene.has_trained(scene.commits[-1].iteration + 5))
    scene.order(0, 3)
    scene.run(lambda: len(scene.exits) == 5)
    return scene


SCRIPT = SimScript(num_samples=160, batch_size=8, num_shards=4, epochs=3, shard_seconds=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_job_grows_loses_a_worker_recovers_shrinks_and_completes(seed: int) -> None:
    scene = grow_lose_and_shrink(seed, SCRIPT)
    kinds = {worker: exit_.kind for worker, exit_ in scene.exits.items()}
    assert kinds == {0: "finished", 1: "killed", 2: "left", 3: "finished", 4: "left"}
    (completed,) = scene.completions
    assert completed.params_sha256 == SCRIPT.undisturbed()[1]
    assert [(count.once, count.more, count.never) for count in completed.ledger] == [(160, 0, 0)] * 3
    check_one_lineage(scene.commits)


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_leaves_once_the_others_have_committed_its_last_round(seed: int) -> None:
    scene = Scene(seed, SCRIPT)
    scene.cluster.delay_seconds = 0.05
    scene.start(0, 1)
    scene.order(0, 1)
    scene.run(scene.has_trained(4))
    scene.order(0)
    scene.run(lambda: any(isinstance(message, Left) for message in scene.messages))
    newest = {commit.worker: commit.iteration for commit in scene.commits}
    assert newest[0] >= newest[1]


class OneBehind(Scene):
    """Worker 2 is lost, and worker 1 does not get the rest of a round that worker 0 has committed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed, SCRIPT)
        self.cluster.delay_seconds = 0.05
        self.start(0, 1, 2)
        self.order(0, 1, 2)
        self.run(self.has_trained(4))
        self.cluster.on_commit = self._on_commit
        self.run(lambda: 2 in self.exits)
        self.cluster.on_commit = self.commits.append
        self.when_receiving = lambda: None
        self.received: list[weakref.ref[Tensor]] = []
        allocate = RunState.allocate_buffers

        def allocate_buffers(state: RunState, skeleton: bytes, **options: bool) -> list[Tensor]:
            """What of a state arrives first is in memory."""
            tensors = allocate(state, skeleton, **options)
            for tensor in tensors:
                tensor.fill_(1)
            self.received += map(weakref.ref, tensors)
            self.when_receiving()
            return tensors

        monkeypatch.setattr(RunState, "allocate_buffers", allocate_buffers)

    def iteration(self, worker: int) -> int:
        """The newest that it has committed."""
        return max(commit.iteration for commit in self.commits if commit.worker == worker)

    def _on_commit(self, commit: Commit) -> None:
        self.commits.append(commit)
        if self.iteration(0) == self.iteration(1) + 1:
            self.lose(2)

    def lose(self, worker: int) -> None:
        """Kill it; worker 1 gets nothing that is still on its way from there."""
        ends = self.process(1), self.process(worker)
        for sock in list(self.cluster.network.sockets):
            if sock.peer and (sock.process, sock.peer.process) == ends:
                sock.lose_peer()
        self.processes[worker].kill()

    def process(self, worker: int) -> Process:
        return next(sim.process for sim in self.cluster.living.values() if sim.config.worker == worker)


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_is_behind_is_whole_until_it_has_all_of_the_newer_state(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = OneBehind(seed, monkeypatch)
    behind = scene.iteration(1)
    assert scene.iteration(0) == behind + 1
    scene.when_receiving = lambda: scene.lose(0)
    scene.order(0, 1, is_recovery=True)
    scene.run(lambda: 0 in scene.exits)
    scene.order(1, is_recovery=True)
    scene.run(scene.is_active(3))
    assert [commit.iteration for commit in scene.commits if commit.worker == 1][-1] == behind
    assert scene.received
    assert not any(each() is not None for each in scene.received), "what it received in vain takes no memory"
    scene.run(lambda: 1 in scene.exits)
    (completed,) = scene.completions
    assert completed.params_sha256 == SCRIPT.undisturbed()[1]
    assert [(count.once, count.more, count.never) for count in completed.ledger] == [(160, 0, 0)] * 3


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_is_behind_gets_nothing_that_an_abandoned_round_has_changed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = OneBehind(seed, monkeypatch)
    scene.order(0, 1, is_recovery=True)
    scene.check_completed()
    assert scene.received


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_has_received_the_state_is_not_behind_any_more(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another recovery is ordered before that one is active: whoever else is behind may need its state."""
    scene = OneBehind(seed, monkeypatch)
    load, num_loaded = RunState.load_received, 0

    def load_while_another_recovery_is_ordered(state: RunState) -> None:
        nonlocal num_loaded
        num_loaded += 1
        load(state)
        if num_loaded == 1:
            scene.order(0, 1, is_recovery=True)
            scene.cluster.threads.sleep(1.0)

    monkeypatch.setattr(RunState, "load_received", load_while_another_recovery_is_ordered)
    scene.order(0, 1, is_recovery=True)
    scene.check_completed()
    assert scene.orders[-1].generation == 3
    assert num_loaded == 1


def test_a_leaver_that_waits_for_a_recovery_leaves_if_it_has_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that were to continue are lost, and another leaver goes on in their place."""
    scene = Scene(0, SCRIPT)
    scene.start(0, 1, 2)
    scene.order(0, 1, 2)
    scene.run(scene.has_trained(3))
    confirm = LeaveAcknowledgement.confirm

    def confirm_or_die(acknowledgement: LeaveAcknowledgement, peer: int, tag: Tag) -> None:
        scene.processes[0].kill()
        if 0 in acknowledgement._poller.links:  # else this is worker 0
            confirm(acknowledgement, peer, tag)

    monkeypatch.setattr(LeaveAcknowledgement, "confirm", confirm_or_die)
    scene.order(0)
    scene.run(lambda: 0 in scene.exits)
    waited = scene.loop.now + 5.0
    scene.run(lambda: scene.loop.now > waited)
    assert 2 not in scene.exits
    scene.order(1, is_recovery=True)
    scene.check_completed()
    assert {worker: exit_.kind for worker, exit_ in scene.exits.items()} == {0: "killed", 1: "finished", 2: "left"}


def test_workers_that_are_ready_say_so_and_wait_for_their_order() -> None:
    scene = Scene(0, SCRIPT)
    scene.start(0, 1)
    waited = scene.loop.now + 10.0
    scene.run(lambda: scene.loop.now > waited)
    for kind in (Imported, Ready):
        assert sorted(message.worker for message in scene.messages if isinstance(message, kind)) == [0, 1]
    assert not scene.exits
    scene.order(0, 1)
    scene.check_completed()


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_are_all_replaced_leave_as_soon_as_the_others_have_the_state(seed: int) -> None:
    scene = Scene(seed, SCRIPT)
    scene.start(0, 1)
    scene.order(0, 1)
    scene.run(scene.has_trained(3))
    scene.start(2, 3)
    scene.order(2, 3)
    scene.run(lambda: {0, 1} <= scene.exits.keys())
    assert not scene.completions
    scene.check_completed()


@pytest.mark.parametrize("heirs", [(0,), (2,)])
def test_a_leaver_goes_on_if_it_is_not_known_that_another_worker_has_what_it_has(
    heirs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is to continue is lost before it can confirm anything."""
    scene = Scene(0, SCRIPT)
    scene.start(0, 1)
    scene.order(0, 1)
    scene.run(scene.has_trained(3))
    if heirs == (2,):
        scene.start(2)
    monkeypatch.setattr(LeaveAcknowledgement, "confirm", lambda *_: scene.processes[heirs[0]].kill())
    scene.order(*heirs)
    scene.run(lambda: heirs[0] in scene.exits)
    monkeypatch.undo()
    scene.order(*sorted({0, 1} - scene.exits.keys()), is_recovery=True)
    scene.check_completed()


def test_members_that_wait_for_the_next_step_of_a_plan_can_be_paused() -> None:
    """A scheduler that is replaced meanwhile, or has no slots, may not order it soon."""
    scene = Scene(0, SCRIPT)
    scene.start(0, 1)
    scene.order(0, 1, until=5)
    waited = scene.loop.now + 20.0
    scene.run(lambda: scene.loop.now > waited)
    assert max(commit.iteration for commit in scene.commits) == 3
    for process in scene.processes.values():
        process.send(Pause(lineage=1))
    scene.run(lambda: any(isinstance(message, CheckpointSaved) for message in scene.messages))
    saved = next(message for message in scene.messages if isinstance(message, CheckpointSaved))
    assert (saved.iteration, saved.pausing) == (5, True), "as far as the plan goes"


def test_a_checkpoint_is_one_of_the_members_before_the_change_at_its_boundary() -> None:
    """A joiner has no copy of the state, and would never store its share."""
    scene = Scene(0, replace(SCRIPT, checkpoint_every=1))
    scene.start(0, 1)
    scene.order(0, 1)
    scene.run(scene.has_trained(3))
    scene.start(2, 3)
    scene.order(0, 1, 2, 3)
    scene.check_completed()
    assert SCRIPT.iterations in {m.iteration for m in scene.messages if isinstance(m, CheckpointSaved)}


def test_a_completion_that_was_not_reported_is_reported_by_another_member(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(0, SCRIPT)
    complete = Reports.complete

    def complete_or_die(reports: Reports, *args: Any, **options: Any) -> Result:
        if reports._session.view.me == 0:
            scene.processes[0].kill()
        return complete(reports, *args, **options)

    monkeypatch.setattr(Reports, "complete", complete_or_die)
    scene.start(0, 1)
    scene.order(0, 1)
    scene.run(lambda: 0 in scene.exits)
    assert not scene.completions
    scene.order(1, is_recovery=True)
    scene.check_completed()


def test_the_ledger_of_a_run_counts_what_its_workers_have_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch_wrongly(_: SimTraining, batch: Batch, leaf: int) -> Indices:
        return np.full_like(batch.shard(leaf), 7)

    monkeypatch.setattr(SimTraining, "_fetch", fetch_wrongly)
    scene = Scene(0, SCRIPT)
    scene.start(0, 1)
    scene.order(0, 1)
    scene.run(lambda: len(scene.exits) == 2)
    (completed,) = scene.completions
    assert [(count.once, count.more, count.never) for count in completed.ledger] == [(0, 1, 159)] * 3


def test_workers_with_different_data_do_not_train_together() -> None:
    scene = Scene(0, replace(SCRIPT, differs=True))
    scene.start(0, 1)
    scene.order(0, 1)
    scene.run(lambda: len(scene.exits) == 2)
    assert not scene.commits
    assert any(isinstance(message, Failed) and "data" in message.message for message in scene.messages)


def check_one_lineage(commits: Sequence[Commit]) -> None:
    """Each iteration has one result, in one generation, or in those that repeat what a lost member had committed."""
    chains: dict[int, bytes] = {}
    for commit in commits:
        assert chains.setdefault(commit.iteration, commit.chain) == commit.chain


def test_a_seed_reproduces_a_run_exactly() -> None:
    def story(seed: int) -> list[Any]:
        scene = grow_lose_and_shrink(seed, SCRIPT)
        return [scene.loop.now, scene.loop.num_steps, scene.commits, scene.messages]

    assert story(7) == story(7)
    assert story(7) != story(8)
