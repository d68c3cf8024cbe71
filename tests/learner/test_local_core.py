"""The director of a local run: who trains when, tried without a single process."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from resile_learner.local.core import Director, Origin
from resile_learner.local.events import Noted, Recorded, Rescaled
from resile_learner.local.plan import PlanError, Step, parse_plan
from resile_learner.local.seam import (
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
from resile_learner.messages import (
    CheckpointSaved,
    Completed,
    Failed,
    Finished,
    Joined,
    Left,
    Order,
    Pause,
    PeerSuspected,
    Progress,
    Ready,
    Stop,
    Switched,
    WorkerListening,
)
from resile_shared.errors import UsageError
from resile_shared.messages.hosts import WorkerExit

NUM_SHARDS = 8
TOTAL = 200


def ready(worker: int, **changes: int) -> Ready:
    message = Ready(
        worker=worker,
        iterations_total=TOTAL,
        num_shards=NUM_SHARDS,
        batch_size=64,
        epochs=2,
        samples=6400,
        bits="same bits",
    )
    return message.model_copy(update=changes)


def progress(worker: int, iteration: int) -> Progress:
    return Progress(worker=worker, generation=1, iteration=iteration, epoch=0)


def completed(worker: int) -> Completed:
    return Completed(
        worker=worker,
        generation=1,
        iteration=TOTAL,
        epoch=1,
        samples_seen=12800,
        loss=0.5,
        metrics={},
        validation={},
        params_sha256="0" * 64,
        model="model.safetensors",
        ledger=(),
        bits="same bits",
    )


class Cluster:
    """Workers that do what real ones would, one step at a time, and a record of all that the director commanded."""

    def __init__(self, plan: str, *, is_default: bool = False, origin: Origin | None = None) -> None:
        self.director = Director("job-1", parse_plan(plan), secret="s", is_default=is_default, origin=origin)
        self.alive: dict[int, list[Order]] = {}
        self.stopped: set[int] = set()
        self.said_hello: set[int] = set()
        self.said_ready: set[int] = set()
        self.orders: list[Order] = []
        self.members: tuple[int, ...] = ()
        self.generation = 0
        self.iteration = 0
        self.outcome: Outcome | None = None
        self.shown: list[object] = []
        self.changes: list[tuple[int, int]] = []
        self.tell(Begin())

    def tell(self, event: Event) -> list[Command]:
        commands = self.director.handle(event, now=1000.0)
        for command in commands:
            self.obey(command)
        return commands

    def obey(self, command: Command) -> None:
        assert self.outcome is None, "nothing is commanded after the end"
        match command:
            case Fork(worker):
                assert worker not in self.alive
                self.alive[worker] = []
            case Send(worker, Order() as order):
                self.alive[worker].append(order)
                if order not in self.orders:
                    self.orders.append(order)
            case Send(worker, Stop()):
                assert worker in self.alive
                assert worker not in self.members or self.director._is_stopping, "a member is never stopped"
                self.stopped.add(worker)
            case Show(event):
                self.shown.append(event)
                if isinstance(event, Rescaled):
                    self.changes.append((event.iteration, event.after))
            case End(outcome):
                self.outcome = outcome

    @property
    def is_whole(self) -> bool:
        """Whether the generation in force has lost nobody."""
        return bool(self.members) and all(worker in self.alive for worker in self.members)

    def hello(self, worker: int) -> None:
        self.said_hello.add(worker)
        self.tell(Said(WorkerListening(worker=worker, host="127.0.0.1", port=1000 + worker)))

    def ready(self, worker: int) -> None:
        self.said_ready.add(worker)
        self.tell(Said(ready(worker)))

    def can_switch(self, order: Order) -> bool:
        """Whether the members could take ``order`` up: every joiner of it is there, linked and at its training call."""
        joiners = set(order.workers) - set(self.members)
        if order.is_recovery:
            return order.generation > self.generation and all(worker in self.alive for worker in order.workers)
        return (
            order.generation > self.generation
            and all(worker in self.alive for worker in self.members)
            and all(
                worker in self.alive and order in self.alive[worker] and worker in self.said_ready
                for worker in joiners - self.stopped
            )
            and not joiners & self.stopped
        )

    def switch(self, order: Order) -> None:
        leavers = [worker for worker in self.members if worker not in order.workers and worker in self.alive]
        current = next((known for known in self.orders if known.generation == self.generation), None)
        if current is not None and current.until is not None and order.not_before:
            self.iteration = max(self.iteration, current.until)
        self.iteration = max(self.iteration, order.not_before)
        lowest = order.workers[0]
        self.members, self.generation = order.workers, order.generation
        self.tell(
            Said(Switched(worker=lowest, generation=order.generation, workers=order.workers, iteration=self.iteration))
        )
        for worker in leavers:
            self.tell(Said(Left(worker=worker, generation=order.generation - 1, iteration=self.iteration)))
            self.exit(worker, "left")

    def exit(self, worker: int, kind: str, status: int = 0) -> None:
        del self.alive[worker]
        self.tell(Exited(worker, WorkerExit.model_validate({"kind": kind, "status": status})))

    def fail(self, worker: int) -> None:
        """Let a worker end by an error of its script."""
        del self.alive[worker]
        self.tell(Said(Failed(worker=worker, message="ValueError: no", details="Traceback ...")))
        exit_ = WorkerExit(kind="failed", status=1, message="ValueError: no", details="Traceback ...")
        self.tell(Exited(worker, exit_))

    def settle(self) -> None:
        """Let everything that is under way come to its end."""
        while self.outcome is None:
            if waiting := [w for w in self.alive if w not in self.said_hello and w not in self.stopped]:
                self.hello(waiting[0])
            elif waiting := [w for w in self.alive if w not in self.said_ready and w not in self.stopped]:
                self.ready(waiting[0])
            elif gone := [w for w in self.alive if w in self.stopped]:
                self.exit(gone[0], "exited")
            elif able := [order for order in self.orders if self.can_switch(order)]:
                self.switch(able[-1])
            else:
                return

    def finish(self) -> None:
        self.tell(Said(completed(self.members[0])))
        for worker in self.members:
            self.tell(Said(Finished(worker=worker)))
            self.exit(worker, "finished")


def test_a_plan_is_followed_to_the_iteration() -> None:
    cluster = Cluster("0:1,50:4,120:3")
    cluster.settle()
    assert cluster.changes == [(0, 1), (50, 4), (120, 3)]
    assert [(order.not_before, order.until) for order in cluster.orders] == [(0, 50), (50, 120), (120, None)]
    assert [order.workers for order in cluster.orders] == [(0,), (0, 1, 2, 3), (0, 1, 2)]
    assert [order.cold_start for order in cluster.orders] == [True, False, False]
    cluster.finish()
    assert cluster.outcome == Outcome("completed")


def test_joiners_start_as_soon_as_the_generation_before_is_in_force() -> None:
    cluster = Cluster("0:1,50:3")
    assert list(cluster.alive) == [0]
    cluster.hello(0)
    cluster.ready(0)
    cluster.switch(cluster.orders[0])
    assert list(cluster.alive) == [0, 1, 2]
    assert len(cluster.orders) == 1
    cluster.hello(1)
    assert len(cluster.orders) == 1, "an order waits until everybody it names said hello"
    cluster.hello(2)
    assert cluster.orders[1].workers == (0, 1, 2)


def test_no_secret_is_used_twice() -> None:
    cluster = Cluster("0:1,50:4,120:3")
    cluster.settle()
    assert len({order.secret for order in cluster.orders}) == 3


def test_the_history_names_every_change_and_the_end() -> None:
    cluster = Cluster("0:2,10:3")
    cluster.settle()
    cluster.finish()
    items = cluster.director.history
    assert [(item.number, item.kind, item.workers, item.iteration, item.reason) for item in items] == [
        (1, "allocation", 2, 0, "start"),
        (2, "allocation", 3, 10, "plan 10:3"),
        (3, "completed", 3, TOTAL, ""),
    ]
    assert items[1].slots == ("local/0", "local/1", "local/2")
    assert [event.item for event in cluster.shown if isinstance(event, Recorded)] == items


def test_a_freed_slot_is_used_again_but_not_its_worker() -> None:
    cluster = Cluster("0:2,10:1")
    cluster.settle()
    cluster.tell(ResizeAsked(2))
    cluster.settle()
    assert cluster.members == (0, 2)
    assert cluster.director.history[-1].slots == ("local/0", "local/1")


def test_the_newest_wish_wins_and_uses_joiners_that_already_started() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    cluster.tell(ResizeAsked(4))
    cluster.tell(ResizeAsked(3))
    assert cluster.stopped == {3}
    cluster.settle()
    assert cluster.members == (0, 1, 2)
    assert len(cluster.orders) == 2


def test_a_joiner_whose_order_was_superseded_is_stopped_once_that_is_certain() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    cluster.tell(ResizeAsked(3))
    cluster.hello(1)
    cluster.hello(2)
    cluster.tell(ResizeAsked(1))
    assert [order.workers for order in cluster.orders] == [(0,), (0, 1, 2), (0,)]
    assert cluster.stopped == set(), "the members might still take up the order that names it"
    cluster.switch(cluster.orders[2])
    assert cluster.stopped == {1, 2}


def test_a_dropped_worker_is_not_named_again() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.tell(ResizeAsked(1))
    cluster.tell(ResizeAsked(3))
    cluster.settle()
    assert cluster.members == (0, 3, 4)


def test_a_wish_before_the_founding_waits_for_it() -> None:
    cluster = Cluster("0:1,50:4")
    cluster.tell(ResizeAsked(2))
    cluster.settle()
    assert cluster.changes == [(0, 1), (0, 2)]
    assert cluster.orders[-1].until is None


def test_a_wish_for_what_is_there_changes_nothing() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    assert cluster.tell(ResizeAsked(2)) == []


def test_a_wish_for_what_is_there_calls_off_what_was_planned() -> None:
    cluster = Cluster("0:1,50:2")
    cluster.hello(0)
    cluster.ready(0)
    cluster.switch(cluster.orders[0])
    cluster.tell(ResizeAsked(1))
    assert cluster.stopped == {1}
    assert cluster.orders[-1].workers == (0,)
    assert cluster.orders[-1].until is None


def test_a_default_number_of_workers_yields_to_the_number_of_shards() -> None:
    cluster = Cluster("0:12", is_default=True)
    cluster.settle()
    assert len(cluster.members) == NUM_SHARDS
    assert cluster.stopped == set(range(NUM_SHARDS, 12))
    cluster.finish()
    assert cluster.outcome == Outcome("completed")


@pytest.mark.parametrize("plan", ["0:9", "0:1,50:9"])
def test_more_workers_than_shards_is_the_users_mistake(plan: str) -> None:
    cluster = Cluster(plan)
    cluster.settle()
    assert cluster.outcome is not None
    assert cluster.outcome.usage
    assert cluster.outcome.error.startswith("9 workers are too many: a batch of 64 is cut into 8 shards, so at most 8")


def test_a_wish_for_more_workers_than_shards_is_refused() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    with pytest.raises(UsageError, match="at most 8 workers"):
        cluster.director.check_resize(9)
    with pytest.raises(UsageError, match="at least 1"):
        cluster.director.check_resize(0)


def test_steps_behind_the_end_are_said_to_have_no_effect() -> None:
    cluster = Cluster("0:1,500:2")
    cluster.settle()
    assert Noted("step 500:2 of the plan has no effect: training ends at iteration 200") in cluster.shown
    assert cluster.changes == [(0, 1)]


def test_workers_that_see_different_training_calls_are_named() -> None:
    cluster = Cluster("0:2")
    cluster.ready(0)
    cluster.tell(Said(ready(1, samples=6000)))
    assert cluster.outcome is not None
    assert "worker 1 disagrees with worker 0 on samples (6000 instead of 6400)" in cluster.outcome.error


def test_others_go_on_without_a_killed_worker_and_a_new_one_takes_its_place() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.exit(1, "killed", -9)
    assert (cluster.orders[-1].workers, cluster.orders[-1].is_recovery) == ((0, 2), True)
    cluster.settle()
    assert cluster.members == (0, 2, 3)
    kinds = [(item.workers, item.reason) for item in cluster.director.history if item.kind == "allocation"]
    assert kinds[1] == (2, "worker 1 was killed by SIGKILL (Killed)")
    assert kinds[2][0] == 3


def test_a_worker_of_which_its_peers_hear_nothing_is_killed_and_replaced() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    for reason, evidence in (("the connection broke", "broken link"), ("worker 2 says so", "hearsay")):
        accusation = PeerSuspected(worker=2, generation=1, suspect=1, evidence=evidence, reason=reason)  # type: ignore[arg-type]
        assert cluster.tell(Said(accusation)) == [], "it may have ended, which is told in a moment"
    silence = PeerSuspected(worker=2, generation=1, suspect=1, evidence="silence", reason="nothing was heard")
    assert cluster.tell(Said(silence)) == [Show(Noted("worker 1 is killed: nothing was heard")), Kill(1)]
    cluster.exit(1, "killed", -9)
    cluster.settle()
    assert cluster.members == (0, 2, 3)
    assert cluster.tell(Said(silence)) == []


def test_a_second_loss_meanwhile_is_recovered_from_too() -> None:
    cluster = Cluster("0:4")
    cluster.settle()
    cluster.exit(1, "killed", -9)
    cluster.exit(0, "killed", -9)
    assert cluster.orders[-1].workers == (2, 3)
    cluster.settle()
    assert len(cluster.members) == 4


def test_nothing_newer_is_ordered_until_those_who_are_left_have_recovered() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.exit(2, "killed", -9)
    cluster.tell(ResizeAsked(1))
    assert cluster.orders[-1].workers == (0, 1)
    cluster.settle()
    assert cluster.members == (0,)


def test_a_plan_is_followed_after_a_loss() -> None:
    cluster = Cluster("0:2,50:3")
    cluster.settle()
    cluster.exit(0, "killed", -9)
    cluster.settle()
    assert len(cluster.members) == 3
    assert cluster.changes[-1] == (50, 3)


def test_a_member_that_leaves_while_others_wait_for_it_is_a_loss_too() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.tell(ResizeAsked(1))
    cluster.exit(0, "killed", -9)
    assert cluster.orders[-1].workers == (1, 2)
    cluster.tell(Said(Left(worker=2, generation=1, iteration=5)))
    cluster.exit(2, "left")
    assert (cluster.orders[-1].workers, cluster.orders[-1].is_recovery) == ((1,), True)
    cluster.settle()
    assert cluster.outcome is None


def test_whoever_a_recovery_drops_may_end() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.tell(ResizeAsked(1))
    cluster.exit(2, "killed", -9)
    assert cluster.orders[-1].workers == (0,)
    cluster.exit(1, "exited")
    assert cluster.outcome is None


def test_a_joiner_that_says_it_trains_is_known_to_have_the_state() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    cluster.tell(ResizeAsked(2))
    cluster.hello(1)
    cluster.ready(1)
    cluster.tell(Said(Joined(worker=1, generation=2, iteration=5)))
    cluster.exit(0, "killed", -9)
    assert (cluster.orders[-1].workers, cluster.orders[-1].is_recovery) == ((1,), True)


def test_a_joiner_that_dies_before_it_is_ordered_costs_nobody_an_iteration() -> None:
    cluster = Cluster("0:1,50:3")
    cluster.hello(0)
    cluster.ready(0)
    cluster.switch(cluster.orders[0])
    cluster.hello(1)
    cluster.exit(2, "killed", -9)
    cluster.settle()
    assert not any(order.is_recovery for order in cluster.orders)
    assert cluster.members == (0, 1, 3)
    assert cluster.changes[-1] == (50, 3)


def test_a_step_that_was_to_come_is_still_to_come_after_a_loss() -> None:
    cluster = Cluster("0:2,50:4")
    for worker in (0, 1):
        cluster.hello(worker)
        cluster.ready(worker)
    cluster.switch(cluster.orders[0])
    cluster.exit(0, "killed", -9)
    cluster.settle()
    assert [after for _, after in cluster.changes] == [2, 1, 2, 4]
    assert cluster.changes[-1] == (50, 4)


def test_once_training_is_complete_one_member_is_enough() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.tell(Said(completed(0)))
    cluster.exit(1, "killed", -9)
    assert (cluster.orders[-1].workers, cluster.orders[-1].is_recovery) == ((0,), True)
    cluster.exit(2, "exited")
    cluster.exit(0, "finished")
    assert cluster.outcome == Outcome("completed")


def test_workers_that_crash_again_and_again_at_one_iteration_end_the_run() -> None:
    cluster = Cluster("0:4")
    cluster.settle()
    for worker in (0, 1, 2):
        assert cluster.outcome is None
        cluster.exit(worker, "killed", -11)
    assert cluster.outcome == Outcome("failed", "worker 2 was killed by SIGSEGV (Segmentation fault)")


def test_the_end_of_the_last_member_ends_the_run_and_is_named() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    cluster.exit(0, "killed", -9)
    cluster.exit(1, "killed", -9)
    assert cluster.outcome == Outcome("failed", "worker 1 was killed by SIGKILL (Killed)")


def test_workers_that_are_killed_from_outside_never_end_the_run() -> None:
    cluster = Cluster("0:2")
    for _ in range(10):
        cluster.settle()
        cluster.exit(cluster.members[-1], "killed", -9)
    cluster.settle()
    assert cluster.outcome is None
    assert len(cluster.members) == 2


def test_an_error_of_one_worker_is_forgiven_and_told_with_its_traceback() -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.fail(1)
    assert (cluster.orders[-1].workers, cluster.orders[-1].is_recovery) == ((0, 2), True)
    assert Noted("worker 1 failed: ValueError: no; the others go on\nTraceback ...") in cluster.shown
    cluster.settle()
    assert cluster.members == (0, 2, 3)


@pytest.mark.parametrize("next_one", [0, 2])
def test_a_shard_that_raises_on_a_second_worker_ends_the_run(next_one: int) -> None:
    cluster = Cluster("0:3")
    cluster.settle()
    cluster.fail(1)
    cluster.settle()
    cluster.fail(next_one)
    assert cluster.outcome == Outcome("failed", f"worker {next_one} failed: ValueError: no", "Traceback ...")


def test_errors_at_different_iterations_are_forgiven_each() -> None:
    cluster = Cluster("0:2")
    for iteration in range(1, 6):
        cluster.settle()
        cluster.tell(Said(progress(cluster.members[0], iteration)))
        cluster.fail(cluster.members[-1])
    cluster.settle()
    assert cluster.outcome is None


def test_the_error_of_the_last_worker_ends_the_run_in_its_own_words() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    cluster.exit(0, "killed", -9)
    cluster.fail(1)
    assert cluster.outcome == Outcome("failed", "worker 1 failed: ValueError: no", "Traceback ...")


def test_an_error_before_training_ends_the_run_at_once() -> None:
    cluster = Cluster("0:2")
    cluster.hello(0)
    cluster.fail(0)
    assert cluster.outcome == Outcome("failed", "worker 0 failed: ValueError: no", "Traceback ...")


def test_an_error_after_training_ends_the_run() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    cluster.tell(Said(completed(0)))
    cluster.fail(1)
    assert cluster.outcome is not None
    assert cluster.outcome.error == "worker 1 failed: ValueError: no, after training was complete"


def test_a_joiner_that_fails_is_forgiven_once() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    cluster.tell(ResizeAsked(3))
    cluster.hello(2)
    cluster.fail(2)
    cluster.switch(cluster.orders[-1])
    assert cluster.outcome is None
    cluster.hello(3)
    cluster.fail(3)
    assert cluster.outcome is not None
    assert cluster.outcome.error == "worker 3 failed: ValueError: no"


def test_memory_that_runs_out_is_no_error_of_the_script_but_ends_the_run_in_time() -> None:
    cluster = Cluster("0:4")
    cluster.settle()
    for worker in (0, 1, 2):
        assert cluster.outcome is None
        cluster.exit(worker, "out of memory", -9)
    assert cluster.outcome is not None
    assert "memory ran out" in cluster.outcome.error


def test_what_nobody_understands_ends_the_run() -> None:
    cluster = Cluster("0:1")
    cluster.tell(Garbled("worker 0 sent a malformed message: x"))
    assert cluster.outcome == Outcome("failed", "worker 0 sent a malformed message: x")


def test_a_generation_that_nobody_ordered_ends_the_run() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    cluster.tell(Said(Switched(worker=0, generation=7, workers=(0,), iteration=3)))
    assert cluster.outcome is not None
    assert "nobody ordered" in cluster.outcome.error


def test_a_script_that_fails_after_training_has_failed() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    cluster.tell(Said(completed(0)))
    cluster.exit(0, "exited", 3)
    assert cluster.outcome is not None
    assert cluster.outcome.state == "failed"
    assert "after training was complete" in cluster.outcome.error


def test_joiners_that_come_too_late_are_stopped_when_training_is_complete() -> None:
    cluster = Cluster("0:1,150:2")
    cluster.hello(0)
    cluster.ready(0)
    cluster.switch(cluster.orders[0])
    cluster.hello(1)
    cluster.finish()
    assert cluster.stopped == {1}
    assert cluster.outcome == Outcome("completed")


def test_a_member_may_leave_before_the_word_of_its_generation_arrives() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    cluster.tell(ResizeAsked(2))
    cluster.hello(1)
    cluster.ready(1)
    cluster.tell(ResizeAsked(1))
    cluster.tell(Said(Left(worker=1, generation=2, iteration=5)))
    cluster.exit(1, "left")
    cluster.tell(Said(Switched(worker=0, generation=2, workers=(0, 1), iteration=4)))
    cluster.tell(Said(Switched(worker=0, generation=3, workers=(0,), iteration=5)))
    assert cluster.outcome is None
    assert cluster.changes[-2:] == [(4, 2), (5, 1)]


def test_a_stop_waits_for_the_workers_but_not_for_ever() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    pause = Pause(generation=1)
    assert cluster.tell(StopAsked()) == [Send(0, pause), Send(1, pause), StopBy(5.0)]
    cluster.exit(0, "exited")
    assert cluster.outcome is None
    cluster.tell(DeadlinePassed())
    assert cluster.outcome == Outcome("stopped")


def test_a_stop_waits_for_its_own_checkpoint_and_ends_when_the_last_worker_has() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    cluster.tell(StopAsked())
    saved = CheckpointSaved(worker=0, iteration=5, generation=1, num_bytes=10)
    cluster.tell(Said(saved))
    assert cluster.stopped == set()
    cluster.tell(Said(saved.model_copy(update={"iteration": 7, "pausing": True})))
    assert cluster.stopped == {0, 1}
    cluster.exit(0, "exited")
    cluster.exit(1, "killed", -9)
    assert cluster.outcome == Outcome("stopped")


def test_workers_that_miss_each_other_while_they_stop_have_not_failed() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    cluster.tell(StopAsked())
    cluster.exit(0, "exited")
    cluster.tell(Said(Failed(worker=1, message="worker 0 is gone")))
    cluster.exit(1, "failed", 1)
    assert cluster.outcome == Outcome("stopped")


def test_a_second_stop_does_not_wait() -> None:
    cluster = Cluster("0:2")
    cluster.settle()
    cluster.tell(StopAsked())
    cluster.tell(StopAsked())
    assert cluster.outcome == Outcome("stopped")


def test_a_stop_before_training_has_nothing_to_wait_for() -> None:
    cluster = Cluster("0:2")
    cluster.hello(0)
    cluster.tell(StopAsked())
    assert cluster.outcome == Outcome("stopped")


def test_a_resumed_run_uses_no_number_again() -> None:
    cluster = Cluster("0:2", origin=Origin(worker=5, generation=4, history=9))
    cluster.settle()
    assert cluster.orders[0].workers == (5, 6)
    assert cluster.orders[0].generation == 4
    assert cluster.orders[0].cold_start
    assert cluster.director.history[0].number == 9


def test_progress_and_checkpoints_are_remembered() -> None:
    cluster = Cluster("0:1")
    cluster.settle()
    saved = CheckpointSaved(worker=0, iteration=5, generation=1, num_bytes=10)
    cluster.tell(Said(progress(0, 7)))
    cluster.tell(Said(saved))
    assert cluster.director.progress == progress(0, 7)
    assert cluster.director.checkpoint == saved


plans = st.lists(
    st.tuples(st.integers(1, TOTAL), st.integers(1, NUM_SHARDS)), max_size=5, unique_by=lambda s: s[0]
).map(sorted)


@given(first=st.integers(1, NUM_SHARDS), later=plans)
def test_any_plan_is_followed(first: int, later: list[tuple[int, int]]) -> None:
    steps = [(0, first), *later]
    cluster = Cluster(",".join(f"{iteration}:{workers}" for iteration, workers in steps))
    cluster.settle()
    assert cluster.changes == steps
    cluster.finish()
    assert cluster.outcome == Outcome("completed")


class AnyOrder(RuleBasedStateMachine):
    """Workers, wishes and ends in any order: the rules hold, and the newest wish is what comes about."""

    @initialize(first=st.integers(1, NUM_SHARDS), later=plans, is_default=st.booleans())
    def begin(self, first: int, later: list[tuple[int, int]], is_default: bool) -> None:
        is_default = is_default and not later
        steps = [(0, first), *later]
        self.cluster = Cluster(",".join(f"{i}:{w}" for i, w in steps), is_default=is_default)
        self.wish: int | None = None

    def over(self) -> bool:
        return self.cluster.outcome is not None

    @precondition(lambda self: not self.over())
    @rule(data=st.data())
    def somebody_speaks(self, data: st.DataObject) -> None:
        cluster = self.cluster
        silent = [w for w in cluster.alive if w not in cluster.said_ready and w not in cluster.stopped]
        if silent:
            worker = data.draw(st.sampled_from(silent))
            (cluster.ready if worker in cluster.said_hello else cluster.hello)(worker)

    @precondition(lambda self: not self.over())
    @rule(data=st.data())
    def a_generation_takes_effect(self, data: st.DataObject) -> None:
        able = [order for order in self.cluster.orders if self.cluster.can_switch(order)]
        if able:
            self.cluster.switch(data.draw(st.sampled_from(able)))

    @precondition(lambda self: not self.over())
    @rule(workers=st.integers(1, NUM_SHARDS))
    def a_wish(self, workers: int) -> None:
        self.wish = workers
        self.cluster.tell(ResizeAsked(workers))

    @precondition(lambda self: not self.over())
    @rule()
    def the_stopped_exit(self) -> None:
        for worker in [w for w in self.cluster.alive if w in self.cluster.stopped]:
            self.cluster.exit(worker, "exited")

    @precondition(lambda self: not self.over() and self.cluster.is_whole)
    @rule()
    def training_is_complete(self) -> None:
        self.cluster.finish()
        assert self.cluster.outcome == Outcome("completed")

    @precondition(lambda self: not self.over() and self.cluster.members)
    @rule(data=st.data())
    def a_member_dies(self, data: st.DataObject) -> None:
        living = [worker for worker in self.cluster.members if worker in self.cluster.alive]
        worker = data.draw(st.sampled_from(living))
        self.cluster.exit(worker, "killed", -9)
        assert self.over() == (living == [worker])
        if self.over():
            assert self.cluster.outcome.error.startswith(f"worker {worker} was killed by SIGKILL")

    @precondition(over)
    @rule(
        event=st.sampled_from([ResizeAsked(3), StopAsked(), DeadlinePassed(), Exited(0, WorkerExit(kind="finished"))])
    )
    def nothing_follows_the_end(self, event: Event) -> None:
        assert self.cluster.tell(event) == []

    @invariant()
    def the_rules_hold(self) -> None:
        orders = self.cluster.orders
        assert [order.generation for order in orders] == list(range(1, len(orders) + 1))
        dropped: set[int] = set()
        for before, order in zip([None, *orders], orders, strict=False):
            assert order.cold_start == (before is None)
            assert order.workers == tuple(sorted(order.workers)), "joiners have higher ids"
            if order.is_recovery:  # it may name those whom an order dropped that did not come into force
                dropped |= {worker for known in orders[: order.generation - 1] for worker in known.workers}
                dropped -= set(order.workers)
            assert not dropped & set(order.workers), "a dropped worker is never named again"
            dropped |= set(before.workers if before else ()) - set(order.workers)
            assert {member.port for member in order.members} == {1000 + worker for worker in order.workers}
        director = self.cluster.director
        assert [item.number for item in director.history] == list(range(1, len(director.history) + 1))
        for item in director.history:
            assert len(set(item.slots)) == item.workers

    def teardown(self) -> None:
        if not hasattr(self, "cluster") or self.over():
            return
        self.cluster.settle()
        assert self.cluster.outcome is None
        if self.wish is not None:
            assert len(self.cluster.members) == self.wish
        self.cluster.finish()
        assert self.cluster.outcome == Outcome("completed")


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestAnyOrder = AnyOrder.TestCase


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "it is empty"),
        ("50:4", "it starts at iteration 50, not at 0"),
        ("0:1,50:4,50:2", "iteration 50 does not come after 50"),
        ("0:1,50:4,20:2", "iteration 20 does not come after 50"),
        ("0:0", "'0:0' leaves no worker"),
        ("0:-1", "'0:-1' is not a pair of whole numbers"),
        ("0:1,,50:2", "'' is not a pair of whole numbers"),
        ("0:1,50", "'50' is not a pair"),
        ("0:1:2", "'0:1:2' is not a pair"),
        ("a:b", "'a:b' is not a pair"),
        ("0:1.5", "'0:1.5' is not a pair"),
        ("0:4000", "more than 1024 workers"),
    ],
)
def test_a_malformed_plan_is_explained(text: str, fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text)
    assert fault in str(caught.value)
    assert "such as 0:1,50:4,120:3" in str(caught.value)


def test_a_plan_may_have_spaces() -> None:
    assert parse_plan(" 0:1, 50 : 4 ") == (Step(0, 1), Step(50, 4))
