"""What an agent decides: allocations are the truth, every worker is reported, and no fact is lost on the way."""

from typing import Any, cast

import orjson
import pytest
from pydantic import ValidationError

from resile_learner.agent.core import (
    ANNOUNCE_SECONDS,
    LISTED_SECONDS,
    AgentCore,
)
from resile_learner.agent.events import (
    AllocationGone,
    AnnounceHost,
    Command,
    EndIncarnation,
    Event,
    KillWorker,
    MessageReceived,
    PrepareEnvironments,
    SendToWorker,
    StartWorker,
    TemplateKept,
    TemplateReady,
    Tick,
    UnwatchAllocation,
    WatchAllocation,
    WorkerExited,
)
from resile_learner.agent.report_filter import PROGRESS_SECONDS
from resile_learner.messages import (
    CheckpointSaved,
    Completed,
    Failed,
    Finished,
    FromWorker,
    GangPlace,
    Joined,
    Left,
    Order,
    Pause,
    Progress,
    Ready,
    Switched,
    Warned,
    WorkerListening,
    encode,
    from_worker,
)
from resile_shared.messages.allocations import Allocation, Placement
from resile_shared.messages.hosts import (
    Address,
    EnvironmentReport,
    Heartbeat,
    HostRecord,
    HostState,
    WorkerExit,
    WorkerReport,
)
from resile_shared.messages.instructions import AssignJobs, PauseWorkers, SendHeartbeat, StopWorkers
from resile_shared.messages.jobs import MAX_WARNINGS
from resile_shared.messages.message import MAX_DETAILS, MAX_TEXT, at
from resile_shared.messages.reports import Report
from resile_shared.recent_events import InternalError

HOST, INCARNATION, JOB = "host-1", 3, "job-1"
READY = Ready(worker=0, iterations_total=30, num_shards=4, batch_size=48, epochs=3, samples=480, bits="same bits")
COMPLETED = Completed(
    worker=0,
    generation=1,
    iteration=30,
    epoch=3,
    samples_seen=1440,
    loss=0.5,
    metrics={},
    validation={},
    params_sha256="0",
    model=None,
    ledger=(),
    bits="same bits",
)


class Agent:
    """A core, the time, and what it did."""

    def __init__(self) -> None:
        self.core = AgentCore(HOST, INCARNATION)
        self.now = 1000.0
        self.handle(Tick(is_bus_up=True))
        self.assign(JOB)

    def assign(self, *jobs: str, epoch: int = 1) -> list[Command]:
        return self.handle(AssignJobs(epoch=epoch, incarnation=INCARNATION, jobs=jobs))

    def handle(self, event: Event, *, after: float = 0.0) -> list[Command]:
        self.now += after
        return self.core.handle(event, now=self.now)

    def message(self, message: FromWorker, *, job: str = JOB, after: float = 0.0) -> list[Command]:
        return self.handle(MessageReceived(job, message), after=after)

    def connects(self, *workers: int) -> list[Command]:
        return [
            c for worker in workers for c in self.message(WorkerListening(worker=worker, host=HOST, port=1 + worker))
        ]

    def exits(self, worker: int, kind: Any = "finished") -> list[Command]:
        return self.handle(WorkerExited(JOB, worker, WorkerExit(kind=kind)))

    def listed(self) -> dict[int, WorkerReport]:
        beat = of_type(Heartbeat, self.handle(Tick(is_bus_up=True), after=1.0))[0]
        return {worker.worker: worker for worker in beat.workers}


def of_type(kind: type[Any], commands: list[Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


def allocation(
    generation: int, *workers: int, epoch: int = 1, addresses: bool = False, host: str = HOST, **fields: Any
) -> Allocation:
    placements = tuple(
        Placement(
            worker=worker,
            host=host,
            incarnation=INCARNATION,
            slot=worker,
            address=Address(host=HOST, port=1 + worker) if addresses else None,
        )
        for worker in workers
    )
    return Allocation(job=JOB, epoch=epoch, generation=generation, placements=placements, secret="s", **fields)


def record(incarnation: int = INCARNATION, state: HostState = HostState.UP, host: str = HOST) -> HostRecord:
    return HostRecord(
        host=host, incarnation=incarnation, state=state, address="a", slots=(), device_class="c", since=at(0.0)
    )


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def training(agent: Agent) -> Agent:
    """Workers 0 and 1 train in generation 1."""
    agent.handle(allocation(1, 0, 1, cold_start=True))
    agent.connects(0, 1)
    agent.handle(allocation(1, 0, 1, cold_start=True, addresses=True))
    agent.message(Switched(worker=0, generation=1, workers=(0, 1), iteration=0))
    return agent


# allocations


def test_an_order_says_of_which_lineage_it_is_and_whether_to_look_for_a_checkpoint(agent: Agent) -> None:
    agent.handle(allocation(2, 0, cold_start=True, lineage=2, resume=True))
    agent.connects(0)
    commands = agent.handle(allocation(3, 0, cold_start=True, addresses=True, lineage=2, resume=True))
    (sent,) = of_type(SendToWorker, commands)
    assert isinstance(sent.message, Order)
    assert (sent.message.lineage, sent.message.cold_start, sent.message.resume) == (2, True, True)


def test_an_order_has_the_batch_of_its_allocation(training: Agent) -> None:
    for generation, batch_size in ((2, 256), (3, None)):
        commands = training.handle(allocation(generation, 0, 1, addresses=True, batch_size=batch_size))
        assert {sent.message.batch_size for sent in of_type(SendToWorker, commands)} == {batch_size}


def test_a_worker_that_is_placed_here_is_started_once(agent: Agent) -> None:
    commands = agent.handle(allocation(1, 0, 1))
    assert of_type(StartWorker, commands) == [StartWorker(JOB, 0, 0), StartWorker(JOB, 1, 1)]
    assert agent.handle(allocation(1, 0, 1)) == []
    agent.exits(0, "failed")
    assert agent.handle(allocation(1, 0, 1)) == []


def test_workers_of_other_hosts_and_of_other_incarnations_are_not_started(agent: Agent) -> None:
    assert agent.handle(allocation(1, 0, host="host-2")) == []
    older = Placement(worker=5, host=HOST, incarnation=INCARNATION - 1, slot=0)
    assert agent.handle(allocation(2).model_copy(update={"placements": (older,)})) == []


def test_an_older_allocation_has_no_effect(agent: Agent) -> None:
    agent.handle(allocation(2, 0, epoch=2))
    assert agent.handle(allocation(2, 1, epoch=1)) == []
    assert agent.handle(allocation(1, 1, epoch=2)) == []
    assert of_type(StartWorker, agent.handle(allocation(1, 1, epoch=3))) == [StartWorker(JOB, 1, 1)]


def test_the_address_of_a_worker_is_reported_at_once(agent: Agent) -> None:
    agent.handle(allocation(1, 0))
    beat = of_type(Heartbeat, agent.connects(0))[0]
    assert beat.workers[0].address == Address(host=HOST, port=1)


def test_an_allocation_with_all_addresses_is_an_order_to_members_joiners_and_leavers(training: Agent) -> None:
    training.handle(allocation(2, 0, 2))
    training.connects(2)
    orders = of_type(SendToWorker, training.handle(allocation(2, 0, 2, addresses=True)))
    assert [send.worker for send in orders] == [0, 1, 2]
    assert isinstance(orders[0].message, Order)
    assert orders[0].message.workers == (0, 2)
    assert (orders[0].message.generation, orders[0].message.cold_start) == (2, False)


def test_a_worker_that_connects_after_the_order_hears_it_then(agent: Agent) -> None:
    agent.handle(allocation(1, 0))
    assert of_type(SendToWorker, agent.handle(allocation(1, 0, addresses=True))) == []
    assert [send.message.generation for send in of_type(SendToWorker, agent.connects(0))] == [1]


def test_without_placements_all_workers_of_the_job_end_and_those_of_others_stay(training: Agent) -> None:
    training.assign(JOB, "job-2")
    other = allocation(1, 0).model_copy(update={"job": "job-2"})
    training.handle(other)
    assert training.handle(allocation(2)) == [KillWorker(JOB, 0), KillWorker(JOB, 1)]
    assert training.handle(allocation(2)) == [], "once is enough"
    assert training.core.needs("job-2")


def test_the_workers_of_a_job_whose_allocation_is_gone_end(training: Agent) -> None:
    assert training.handle(AllocationGone(JOB)) == [KillWorker(JOB, 0), KillWorker(JOB, 1)]


def test_a_job_is_needed_here_until_its_last_worker_is_gone_and_the_scheduler_knows(training: Agent) -> None:
    training.handle(allocation(2, 7, host="host-2"))
    training.exits(0, "left")
    assert training.assign() == [], "a worker is here, whatever the scheduler knows"
    assert training.core.needs(JOB)
    assert training.exits(1, "left")[-1] == UnwatchAllocation(JOB)
    assert not training.core.needs(JOB)


def test_all_jobs_may_be_needed_before_the_scheduler_says_which() -> None:
    core = AgentCore(HOST, INCARNATION)
    assert core.needs(JOB)
    core.handle(AssignJobs(epoch=1, incarnation=INCARNATION, jobs=()), now=1000.0)
    assert not core.needs(JOB)


def test_the_allocations_of_assigned_jobs_are_watched_and_those_of_others_have_no_effect(agent: Agent) -> None:
    assert agent.assign(JOB, "job-2") == [WatchAllocation("job-2")]
    assert agent.assign("job-2") == [UnwatchAllocation(JOB)]
    assert agent.handle(allocation(1, 0)) == [], "it arrived when nobody watched it any more"
    assert agent.assign(JOB) == [UnwatchAllocation("job-2"), WatchAllocation(JOB)]
    assert of_type(StartWorker, agent.handle(allocation(1, 0))) == [StartWorker(JOB, 0, 0)]


def test_the_watch_of_a_worker_goes_on_when_its_job_is_taken_from_the_host(training: Agent) -> None:
    assert training.assign() == []
    orders = of_type(SendToWorker, training.handle(allocation(2, 0, addresses=True)))
    assert {(send.worker, send.message.generation) for send in orders} == {(0, 2), (1, 2)}
    assert training.handle(AllocationGone(JOB)) == [KillWorker(JOB, 0), KillWorker(JOB, 1)]


def test_jobs_for_another_incarnation_or_of_an_earlier_scheduler_are_not_watched(agent: Agent) -> None:
    assert agent.handle(AssignJobs(epoch=1, incarnation=INCARNATION - 1, jobs=("job-2",))) == []
    assert agent.assign(JOB, "job-2", epoch=2) == [WatchAllocation("job-2")]
    assert agent.assign(JOB, epoch=1) == []


def test_heartbeats_name_the_jobs_that_were_assigned(training: Agent) -> None:
    training.assign("job-3", "job-2")
    [beat] = of_type(Heartbeat, training.handle(Tick(is_bus_up=True), after=1.0))
    assert beat.jobs == ("job-2", "job-3"), "though a worker of job-1 is here"
    fresh = AgentCore(HOST, INCARNATION)
    [beat] = of_type(Heartbeat, fresh.handle(Tick(is_bus_up=True), now=1000.0))
    assert beat.jobs is None


# heartbeats


def test_a_heartbeat_shows_each_worker_as_it_is(agent: Agent) -> None:
    agent.handle(allocation(1, 0, 1, 2, 3))
    agent.connects(0, 1, 2)
    for worker in (0, 1, 2):
        agent.message(READY.model_copy(update={"worker": worker}))
    agent.message(Switched(worker=0, generation=1, workers=(0, 1), iteration=0))
    agent.message(Left(worker=1, generation=1, iteration=4))
    agent.message(Progress(worker=0, generation=1, iteration=6, epoch=0))
    seen = agent.listed()
    assert {number: worker.state for number, worker in seen.items()} == {
        0: "member",
        1: "left",
        2: "ready",
        3: "starting",
    }
    assert [(seen[number].generation, seen[number].iteration) for number in (0, 1, 2)] == [(1, 6), (1, 4), (0, 0)]


@pytest.mark.parametrize(
    "event",
    [
        MessageReceived(JOB, READY),
        MessageReceived(JOB, Switched(worker=0, generation=2, workers=(0, 1), iteration=9)),
        MessageReceived(JOB, Left(worker=0, generation=1, iteration=9)),
        WorkerExited(JOB, 0, WorkerExit(kind="killed", status=-9)),
    ],
)
def test_a_change_of_a_worker_is_reported_at_once(agent: Agent, event: Event) -> None:
    agent.handle(allocation(1, 0))
    assert len(of_type(Heartbeat, agent.handle(event))) == 1


def test_the_numbers_of_heartbeats_rise(training: Agent) -> None:
    beats = [of_type(Heartbeat, training.handle(Tick(True), after=1.0))[0].number for _ in range(3)]
    assert beats == sorted(set(beats))


def test_a_worker_that_is_gone_stays_listed_while_the_newest_allocation_names_it(training: Agent) -> None:
    training.exits(1, "killed")
    training.now += 2 * LISTED_SECONDS
    assert training.listed()[1].exit == WorkerExit(kind="killed")
    training.handle(allocation(2, 0))
    assert 1 not in training.listed()


def test_a_worker_that_nobody_names_is_still_listed_for_a_while_after_its_end(training: Agent) -> None:
    training.handle(allocation(2, 0, addresses=True))
    training.exits(1, "left")
    assert training.listed()[1].state == "gone"
    training.now += LISTED_SECONDS
    assert 1 not in training.listed()


def test_a_worker_that_ended_and_was_forgotten_is_not_started_when_it_is_named_once_more(training: Agent) -> None:
    training.handle(allocation(2, 0))
    training.handle(Tick(is_bus_up=False), after=1.0)
    training.exits(1, "left")
    training.handle(Tick(is_bus_up=False), after=LISTED_SECONDS)
    assert (JOB, 1) not in training.core.workers, "nobody has heard of its end"
    training.handle(Tick(is_bus_up=True), after=1.0)
    commands = training.handle(allocation(3, 0, 1, epoch=2))
    assert of_type(StartWorker, commands) == []
    [beat] = of_type(Heartbeat, commands)
    assert (beat.workers[-1].worker, beat.workers[-1].state) == (1, "gone")
    assert of_type(StartWorker, training.handle(allocation(4, 0, 2, epoch=2))) == [StartWorker(JOB, 2, 2)]


def test_a_worker_with_a_lower_number_than_another_new_one_is_started(agent: Agent) -> None:
    agent.handle(StopWorkers(epoch=1, job=JOB, incarnation=INCARNATION, workers=(7,)))
    started = of_type(StartWorker, agent.handle(allocation(1, 3, 1, 2)))
    assert [start.worker for start in started] == [3, 1, 2], "a stop may come before the allocation"


def test_no_heartbeat_is_sent_while_nats_is_disconnected_and_the_next_one_reports_every_change(training: Agent) -> None:
    assert training.handle(Tick(is_bus_up=False), after=1.0) == []
    assert training.exits(1, "killed") == []
    training.handle(Tick(is_bus_up=False), after=3.0)
    beat = of_type(Heartbeat, training.handle(Tick(is_bus_up=True), after=1.0))[0]
    assert beat.workers[1].state == "gone"


def test_a_member_is_listed_as_one_also_where_the_lowest_rank_is_elsewhere(agent: Agent) -> None:
    agent.handle(allocation(1, 1))
    (beat,) = agent.message(Joined(worker=1, generation=1, iteration=8))
    assert isinstance(beat, Heartbeat)
    assert (beat.workers[0].state, beat.workers[0].generation, beat.workers[0].iteration) == ("member", 1, 8)


# instructions


def test_workers_are_stopped_once_and_unknown_ones_are_reported_gone(training: Agent) -> None:
    stop = StopWorkers(epoch=1, job=JOB, incarnation=INCARNATION, workers=(1, 9))
    commands = training.handle(stop)
    assert of_type(KillWorker, commands) == [KillWorker(JOB, 1)]
    assert of_type(Heartbeat, commands)[0].workers[-1].exit.kind == "not started"
    assert training.handle(stop) == [], "a stop that is repeated leads to no flood of heartbeats"


def test_a_stop_for_another_incarnation_has_no_effect(training: Agent) -> None:
    assert training.handle(StopWorkers(epoch=1, job=JOB, incarnation=INCARNATION - 1, workers=(0, 1))) == []


def test_a_worker_that_was_stopped_before_it_started_is_never_started(agent: Agent) -> None:
    agent.handle(StopWorkers(epoch=1, job=JOB, incarnation=INCARNATION, workers=(0,)))
    assert of_type(StartWorker, agent.handle(allocation(1, 0, 1))) == [StartWorker(JOB, 1, 1)]


def test_a_pause_is_sent_to_all_workers_of_the_job(training: Agent) -> None:
    commands = training.handle(PauseWorkers(epoch=1, job=JOB, lineage=1))
    assert commands == [SendToWorker(JOB, worker, Pause(lineage=1)) for worker in (0, 1)]


# reports


def test_what_a_worker_reports_is_passed_on_with_its_identity(training: Agent) -> None:
    (report,) = of_type(
        Report, training.message(CheckpointSaved(lineage=1, worker=1, generation=1, iteration=8, num_bytes=9))
    )
    assert (report.job, report.host, report.incarnation) == (JOB, HOST, INCARNATION)
    assert (report.worker, report.slot, report.generation) == (1, 1, 1)
    assert (report.content.kind, report.content.iteration) == ("checkpoint", 8)


def test_progress_is_passed_on_a_few_times_a_second_and_the_newest_before_each_fact(training: Agent) -> None:
    def told(commands: list[Command]) -> list[Any]:
        return [(r.content.kind, r.content.iteration) for r in of_type(Report, commands)]

    def progress(iteration: int, **fields: Any) -> Progress:
        return Progress(worker=0, generation=1, iteration=iteration, epoch=0, **fields)

    assert told(training.message(progress(1))) == [("progress", 1)]
    assert told(training.message(progress(2))) == []
    assert told(training.message(progress(3))) == []
    assert told(training.message(progress(4), after=PROGRESS_SECONDS)) == [("progress", 4)]
    assert told(training.message(progress(5))) == []
    assert told(training.message(progress(6, ends_epoch=True))) == [("progress", 6)]
    assert told(training.message(progress(30))) == []
    assert told(training.message(COMPLETED)) == [("progress", 30), ("completed", 30)]


def test_progress_that_nothing_follows_is_passed_on_at_the_next_tick(training: Agent) -> None:
    for iteration in (1, 2):
        training.message(Progress(worker=0, generation=1, iteration=iteration, epoch=0))
    (report,) = of_type(Report, training.handle(Tick(is_bus_up=False), after=1.0))
    assert report.content.iteration == 2


def test_a_warning_is_passed_on_once_and_of_too_many_that_there_are_more(training: Agent) -> None:
    texts = [f"warning {number}" for number in range(MAX_WARNINGS)]
    for worker in (0, 1):
        told = [
            report.content.message
            for text in [texts[0], *texts, "another", "and another"]
            for report in of_type(Report, training.message(Warned(worker=worker, message=text)))
        ]
        assert told[:-1] == texts
        assert told[-1] == f"worker {worker} warned of more than {MAX_WARNINGS} things: its other warnings are left out"


def test_the_end_of_a_script_is_no_report(training: Agent) -> None:
    assert training.message(Finished(worker=0)) == []


def test_what_a_worker_reports_of_its_failure_is_passed_on(training: Agent) -> None:
    (report,) = of_type(Report, training.message(Failed(worker=1, message="no", details="where")))
    assert (report.content.message, report.content.details) == ("no", "where")


def test_what_a_worker_reports_of_its_end_is_cut_to_what_a_message_has_room_for(training: Agent) -> None:
    failed = Failed(worker=1, message="m" * 10**6, details="d" * 10**6 + "end")
    (report,) = of_type(Report, training.message(failed))
    training.handle(WorkerExited(JOB, 1, WorkerExit(kind="failed", message=failed.message, details=failed.details)))
    for told in (report.content, training.listed()[1].exit):
        assert told.message == "m" * MAX_TEXT
        assert len(told.details) == MAX_DETAILS
        assert told.details.endswith("end")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_metric_that_is_no_number_harms_nothing(training: Agent, number: float) -> None:
    said = Progress(worker=0, generation=1, iteration=1, epoch=0, loss=number, metrics={"a": number, "b": 1.0})
    (report,) = of_type(Report, training.message(cast(Progress, from_worker.validate_json(encode(said)))))
    assert Report.model_validate_json(report.model_dump_json()).content == report.content
    assert (report.content.loss, report.content.metrics) == (None, {"b": 1.0})


@pytest.mark.parametrize("number", ["iteration", "generation", "worker"])
def test_a_number_that_cannot_be_is_no_message(number: str) -> None:
    fields = {"kind": "progress", "worker": 0, "generation": 1, "iteration": 1, "epoch": 0, number: -1}
    with pytest.raises(ValidationError):
        from_worker.validate_json(orjson.dumps(fields))


# environments


def environments(commands: list[Command]) -> dict[str, str] | None:
    """The state of each, as the heartbeat among ``commands`` lists it."""
    (beat,) = of_type(Heartbeat, commands)
    return None if beat.environments is None else {each.job: each.state for each in beat.environments}


def ahead(*jobs: str) -> AssignJobs:
    return AssignJobs(epoch=1, incarnation=INCARNATION, jobs=(), environments=jobs)


def test_environments_are_built_ahead_as_the_newest_assignment_says_and_each_change_is_reported() -> None:
    core = AgentCore(HOST, INCARNATION, builds_ahead=True)
    assert environments(core.handle(Tick(is_bus_up=True), now=1000.0)) == {}
    assert core.handle(ahead("job-2", "job-3"), now=1000.0) == [PrepareEnvironments(("job-2", "job-3"))]
    assert core.handle(ahead("job-2", "job-3"), now=1000.0) == [], "it is repeated"
    ready = core.handle(EnvironmentReport(job="job-3", state="ready"), now=1001.0)
    assert environments(ready) == {"job-2": "waiting", "job-3": "ready"}
    assert core.handle(EnvironmentReport(job="job-9", state="ready"), now=1001.0) == [], "nobody has asked for it"
    assert core.handle(ahead("job-3", "job-4"), now=1002.0) == [PrepareEnvironments(("job-3", "job-4"))]
    beat = core.handle(Tick(is_bus_up=True), now=1003.0)
    assert environments(beat) == {"job-3": "ready", "job-4": "waiting"}


def test_a_host_that_builds_no_environments_ahead_says_so() -> None:
    core = AgentCore(HOST, INCARNATION)
    assert environments(core.handle(Tick(is_bus_up=True), now=1000.0)) is None
    assert core.handle(ahead("job-2"), now=1000.0) == []
    assert core.handle(EnvironmentReport(job="job-2", state="ready"), now=1001.0) == []


def test_a_heartbeat_is_sent_at_once_only_to_who_probes_this_incarnation(agent: Agent) -> None:
    assert len(of_type(Heartbeat, agent.handle(SendHeartbeat(incarnation=INCARNATION)))) == 1
    assert agent.handle(SendHeartbeat(incarnation=INCARNATION + 1)) == []


def test_an_internal_error_lists_the_last_events(agent: Agent) -> None:
    agent.handle(allocation(1, 0))
    with pytest.raises(InternalError, match="agent of host-1") as caught:
        agent.exits(7)
    assert "generation=1" in str(caught.value)


# the host


def test_the_host_is_announced_with_growing_pauses_until_the_registry_has_stored_it() -> None:
    core = AgentCore(HOST, INCARNATION)
    announced = [AnnounceHost() in core.handle(Tick(is_bus_up=True), now=1000.0 + second) for second in range(40)]
    assert [second for second, is_announced in enumerate(announced) if is_announced] == [
        0,
        ANNOUNCE_SECONDS,
        3 * ANNOUNCE_SECONDS,
        7 * ANNOUNCE_SECONDS,
    ]
    core.handle(record(), now=1040.0)
    assert AnnounceHost() not in core.handle(Tick(is_bus_up=True), now=2000.0)


def test_the_host_is_announced_once_the_templates_of_its_previous_incarnation_are_ready() -> None:
    core = AgentCore(HOST, INCARNATION)
    core.handle(TemplateKept("old", "key", ()), now=1000.0)
    assert AnnounceHost() not in core.handle(Tick(is_bus_up=True), now=1001.0)
    assert core.handle(TemplateReady(1, 100, 100), now=1002.0) == [AnnounceHost()]


@pytest.mark.parametrize("state", [HostState.LOST, HostState.LEFT])
def test_an_incarnation_that_the_registry_gave_up_ends(agent: Agent, state: HostState) -> None:
    (end,) = agent.handle(record(state=state))
    assert isinstance(end, EndIncarnation)
    assert not end.is_superseded


def test_what_the_registry_says_of_others_changes_nothing(agent: Agent) -> None:
    assert agent.handle(record(INCARNATION - 1, HostState.LOST)) == []
    assert agent.handle(record(state=HostState.LOST, host="host-2")) == []
    assert agent.handle(record(state=HostState.DRAINING)) == []


def test_a_higher_incarnation_is_another_agent(agent: Agent) -> None:
    (end,) = agent.handle(record(INCARNATION + 1))
    assert isinstance(end, EndIncarnation)
    assert end.is_superseded


def test_no_worker_is_started_on_a_slot_that_is_held(agent: Agent) -> None:
    agent.assign(JOB, "job-2")
    agent.handle(allocation(1, 0, cold_start=True))
    other = allocation(1, 0, cold_start=True).model_copy(update={"job": "job-2"})
    assert of_type(StartWorker, agent.handle(other)) == []
    [beat] = of_type(Heartbeat, agent.handle(Tick(is_bus_up=True), after=1.0))
    [first, second] = beat.workers
    assert (first.job, first.state) == (JOB, "starting")
    assert (second.job, second.state, second.slot) == ("job-2", "gone", 0)
    assert second.exit.message == "worker 0 was not started: host-1/0 is held by worker 0 of job-1"
    agent.exits(0)
    later = allocation(2, 0, 1, cold_start=True).model_copy(update={"job": "job-2"})
    later = later.model_copy(update={"placements": (later.placements[1].model_copy(update={"slot": 0}),)})
    assert of_type(StartWorker, agent.handle(later)) == [StartWorker("job-2", 1, 0)]


def test_nothing_of_a_scheduler_that_was_replaced_has_an_effect(agent: Agent) -> None:
    agent.handle(allocation(1, 0, cold_start=True))
    agent.connects(0)
    agent.assign(JOB, "job-2", "job-3")
    agent.handle(allocation(1, 3, epoch=2).model_copy(update={"job": "job-2"}))
    late: tuple[Event, ...] = (
        allocation(2, 0, 1),
        allocation(2),
        allocation(1, 2, cold_start=True).model_copy(update={"job": "job-3"}),
        StopWorkers(epoch=1, job=JOB, incarnation=INCARNATION, workers=(0,)),
        PauseWorkers(epoch=1, job=JOB, lineage=1),
    )
    for event in late:
        assert agent.handle(event) == []
    assert agent.handle(PauseWorkers(epoch=2, job=JOB, lineage=1)) == [SendToWorker(JOB, 0, Pause(lineage=1))]


def test_heartbeats_say_how_many_facts_are_not_published_yet(agent: Agent) -> None:
    [beat] = of_type(Heartbeat, agent.handle(Tick(is_bus_up=True, num_waiting=7), after=1.0))
    assert beat.num_waiting == 7


def test_a_worker_of_a_gang_is_told_its_place_among_all_and_on_its_host(agent: Agent) -> None:
    here = allocation(1, 3, 4).placements
    elsewhere = allocation(1, 1, host="host-2").placements
    whole = allocation(1, gang=True).model_copy(update={"placements": (here[0], *elsewhere, here[1])})
    starts = of_type(StartWorker, agent.handle(whole))
    slots = (3, 4)
    assert [start.gang for start in starts] == [
        GangPlace(rank=0, size=3, local_rank=0, local_size=2, local_slots=slots),
        GangPlace(rank=2, size=3, local_rank=1, local_size=2, local_slots=slots),
    ]
