"""The scheduler as a service, on a real bus, with the real registry and agents that only act."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry import trace

import resile_registry.service
import resile_scheduler.core.losses.recovery
import resile_scheduler.executor
import resile_scheduler.service
from resile_registry.settings import RegistrySettings
from resile_scheduler.core.events import JobSubmitted
from resile_scheduler.core.job_commands import JobCommands
from resile_scheduler.core.worker_reports import WorkerReports
from resile_scheduler.executor import Batch, Executor
from resile_scheduler.lease import Lease
from resile_scheduler.settings import SchedulerSettings
from resile_shared.bus import nats_server, subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.envelope import Received
from resile_shared.bus.nats_server import NatsServer
from resile_shared.bus.subjects import (
    ALLOCATIONS,
    DEAD_LETTERS,
    EVENTS,
    JOB_EVENTS,
    JOBS,
    LEASE,
    POLICY,
    POLICY_KEY,
    TENANTS,
    TENANTS_KEY,
)
from resile_shared.messages.commands import (
    ID_REUSED,
    Accepted,
    ExplainJobs,
    JobDelete,
    JobExplanations,
    JobPause,
    JobPriority,
    JobResume,
    JobStop,
    JobSubmit,
    PoolPolicy,
    Refused,
    TenantDelete,
    TenantSet,
)
from resile_shared.messages.deadletters import DeadLetter
from resile_shared.messages.hosts import Heartbeat, HostRecord, HostState, Slot
from resile_shared.messages.jobs import HistoryItem, JobEvent, JobRecord, JobSpec
from resile_shared.messages.message import at
from resile_shared.messages.pool import PolicyEvent, PoolSettings, TenantEvent, TenantShare
from resile_shared.messages.reports import PeerSuspected, Ready, Report, Warned
from resile_shared.policies import PolicyName
from resile_shared.service import ServiceContext
from resile_shared.telemetry.traces import set_up_tracing, traced
from resile_shared.version import VERSION
from resile_testing.fake_agent import FakeAgent
from resile_testing.fixtures import Pool
from resile_testing.histories import check_history
from resile_testing.services import as_process, in_process
from resile_testing.spans import KeptSpans
from resile_testing.waiting import until

from .full_bus import limit_records


def spec(**changes: object) -> JobSpec:
    return JobSpec.model_validate({"name": "train", "package": "packages/1", "script": "train.py", **changes})


class Watcher:
    """The records and events of jobs, as any service can read them."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.records: dict[str, JobRecord] = {}
        self.events: list[JobEvent] = []
        self.items: dict[tuple[str, int], HistoryItem] = {}
        self.kept: set[str] = set()
        """The jobs that have a record now."""

    async def records_change(self) -> None:
        """Show each record once its history is known: what it does not hold was published before."""
        async for changes in self.bus.bucket(JOBS).watch():
            for change in changes:
                if (record := change.value) is None:
                    self.kept.discard(change.key)
                    continue
                self.kept.add(record.job)
                self.items |= {(record.job, item.number): item for item in record.unpublished}
                if not record.is_deleted:
                    await until(lambda record=record: len(self.history(record.job)) >= record.num_items)  # type: ignore[misc]
                self.records[record.job] = record

    async def events_come(self) -> None:
        async def note(received: Received[JobEvent]) -> None:
            self.events.append(received.message)
            self.items[received.message.job, received.message.item.number] = received.message.item

        await self.bus.follow(EVENTS, JobEvent, note, subjects=(JOB_EVENTS,))

    def state(self, job: str = "job-1") -> str:
        return self.records[job].state.value if job in self.records else "unknown"

    def workers(self, job: str = "job-1") -> int:
        """Members of the active generation."""
        record = self.records.get(job)
        return record.allocation.workers if record and record.allocation else 0

    def history(self, job: str = "job-1") -> list[HistoryItem]:
        return [item for (name, _), item in sorted(self.items.items()) if name == job]

    def kinds(self, job: str = "job-1") -> list[str]:
        return [item.kind for item in self.history(job)]

    async def all_events_of(self, job: str = "job-1") -> list[int]:
        """Wait until the history is published to its end; return the numbers as they were published."""
        end = self.records[job].num_items
        await until(lambda: any(e.job == job and e.item.number == end for e in self.events))
        return [event.item.number for event in self.events if event.job == job]


class House:
    """A pool with a registry, and what a test does to it."""

    def __init__(self, pool: Pool, stack: AsyncExitStack, publisher: Bus, watcher: Watcher) -> None:
        self.pool = pool
        self.watcher = watcher
        self.publisher = publisher
        self._stack = stack

    async def agent(self, host: str, slots: int = 4, **options: int) -> FakeAgent:
        bus = await self.pool.bus("learner", service=f"agent of {host}")
        return await self._stack.enter_async_context(FakeAgent(bus, host, slots=slots, **options))

    async def submit(self, *, message_id: str | None = None, **changes: object) -> str:
        answer = await self.publisher.ask(
            subjects.command("job", "submit"), JobSubmit(spec=spec(**changes)), message_id=message_id
        )
        assert isinstance(answer, Accepted)
        assert answer.job_id is not None
        return answer.job_id

    async def ask(self, request: JobPriority | JobStop | JobPause | JobResume | JobDelete) -> Accepted | Refused:
        verb = type(request).__name__.removeprefix("Job").lower()
        return await self.publisher.ask(subjects.command("job", verb), request)


@pytest.fixture
async def house(pool: Pool) -> AsyncIterator[House]:
    async with furnished(pool) as house:
        yield house


@asynccontextmanager
async def furnished(pool: Pool, **settings: object) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            in_process(pool, "registry", resile_registry.service.run, RegistrySettings, **settings)
        )
        watcher = Watcher(await pool.bus("monitor"))
        for work in (watcher.records_change(), watcher.events_come()):
            task = asyncio.create_task(work)
            stack.callback(task.cancel)
        yield House(pool, stack, await pool.bus("monitor", service="requests"), watcher)


@asynccontextmanager
async def scheduler(pool: Pool, **settings: object) -> AsyncIterator[None]:
    async with in_process(pool, "scheduler", resile_scheduler.service.run, SchedulerSettings, **settings):
        yield


async def test_a_job_goes_from_its_submission_to_its_completion(house: House) -> None:
    async with scheduler(house.pool):
        agent = await house.agent("host-1")
        assert await house.submit() == "job-1"
        await until(lambda: house.watcher.state() == "running" and house.watcher.workers() == 4)
        await agent.complete("job-1")
        await until(lambda: house.watcher.state() == "completed")
        numbers = await house.watcher.all_events_of()
        assert numbers == list(range(1, len(numbers) + 1))
        kinds = [kind for kind in house.watcher.kinds() if kind != "queued"]
        assert kinds == ["accepted", "allocation", "completed"]


async def test_the_same_submission_makes_one_job_which_is_stored_before_the_answer(house: House) -> None:
    async with scheduler(house.pool):
        assert await house.submit(message_id="the same") == "job-1"
        entry = await house.watcher.bus.bucket(JOBS).get("job-1")
        assert entry is not None
        assert entry.value.applied_commands == ("the same",)
    async with scheduler(house.pool):  # one that remembers nothing itself
        assert await house.submit(message_id="the same") == "job-1"
        assert await house.submit(message_id="another") == "job-2"


async def test_an_id_that_is_used_for_another_request_is_refused(house: House) -> None:
    subject = subjects.command("job", "submit")
    async with scheduler(house.pool):
        await house.submit(message_id="once")
        other = JobSubmit(spec=spec(name="other"))
        assert await house.publisher.ask(subject, other, message_id="once") == ID_REUSED
    async with scheduler(house.pool):  # one that remembers nothing itself
        assert await house.publisher.ask(subject, other, message_id="once") == ID_REUSED
        assert await house.submit(message_id="once") == "job-1"


async def test_two_jobs_share_and_follow_their_priorities(house: House) -> None:
    watcher = house.watcher
    async with scheduler(house.pool):
        agents = [await house.agent("host-1"), await house.agent("host-2")]
        await house.submit()
        await until(lambda: watcher.workers("job-1") == 8)
        await house.submit()
        await until(lambda: (watcher.workers("job-1"), watcher.workers("job-2")) == (4, 4))
        await house.ask(JobPriority(job_id="job-2", priority=10_000))
        await until(lambda: (watcher.workers("job-1"), watcher.workers("job-2")) == (3, 5))
        for agent in agents:
            await agent.complete("job-1")
        await until(lambda: watcher.workers("job-2") == 8)
        assert watcher.state("job-1") == "completed"
        for agent in agents:
            assert {job for job, _ in agent.workers} == {"job-2"}


async def test_with_the_policy_priority_the_higher_job_preempts(house: House) -> None:
    async with scheduler(house.pool, policy="priority"):
        await house.agent("host-1")
        await house.submit(min_workers=2)
        await until(lambda: house.watcher.workers("job-1") == 4)
        await house.submit(min_workers=4, priority=9000)
        await until(lambda: house.watcher.state("job-1") == "queued" and house.watcher.workers("job-2") == 4)
        assert "suspending" in house.watcher.kinds("job-1")


async def test_a_policy_is_stored_before_the_answer_and_later_schedulers_keep_it(house: House) -> None:
    bus = house.watcher.bus
    subject = subjects.command("pool", "policy")

    async def stored() -> tuple[str, bool, int]:
        entry = await bus.bucket(POLICY).get(POLICY_KEY)
        assert entry is not None
        return entry.value.policy.value, entry.value.preemption, entry.value.number

    async with as_process(house.pool, "scheduler", "--lease-seconds", "0.5") as process:
        fifo = PoolPolicy(policy=PolicyName.FIFO)
        assert await house.publisher.ask(subject, fifo, message_id="once") == Accepted()
        assert await stored() == ("fifo", True, 1)
        assert await house.publisher.ask(subject, PoolPolicy(preemption=False)) == Accepted()
        assert await stored() == ("fifo", False, 2)
        process.kill()
    async with scheduler(house.pool, policy="priority", lease_seconds=0.5):
        assert await house.publisher.ask(subject, fifo, message_id="once") == Accepted()
        assert await stored() == ("priority", False, 3), "what a scheduler is started with precedes what is stored"
    async with scheduler(house.pool):
        await house.submit()
        assert await stored() == ("priority", False, 3)
    events = await bus.read_stream(EVENTS, PolicyEvent, subject=subjects.pool_event("policy")).page(10, skip=0)
    assert [(event.message.number, event.message.policy, event.message.preemption) for event in events] == [
        (1, PolicyName.FIFO, True),
        (2, PolicyName.FIFO, False),
        (3, PolicyName.PRIORITY, False),
    ]


async def test_tenants_are_stored_before_the_answer_and_later_schedulers_keep_them(house: House) -> None:
    bus = house.watcher.bus
    change, delete = subjects.command("tenant", "set"), subjects.command("tenant", "delete")

    async def stored() -> dict[str, TenantShare]:
        entry = await bus.bucket(TENANTS).get(TENANTS_KEY)
        assert entry is not None
        return entry.value.tenants

    async with as_process(house.pool, "scheduler", "--lease-seconds", "0.5") as process:
        first = TenantSet(tenant_id="vision", weight=2)
        assert await house.publisher.ask(change, first, message_id="once") == Accepted()
        assert await stored() == {"vision": TenantShare(weight=2)}
        refused = await house.publisher.ask(change, TenantSet(tenant_id="vision", quota=1))
        assert isinstance(refused, Refused)
        assert "it has 0 slots" in refused.reason
        process.kill()
    async with scheduler(house.pool):
        assert await house.publisher.ask(delete, TenantDelete(tenant_id="vision")) == Accepted()
        assert await house.publisher.ask(change, first, message_id="once") == Accepted()
        assert await stored() == {}, "the first request had its effect before"
    events = await bus.read_stream(EVENTS, TenantEvent, subject=subjects.pool_event("tenant")).page(10, skip=0)
    assert [(event.message.number, event.message.tenant, event.message.share) for event in events] == [
        (1, "vision", TenantShare(weight=2)),
        (2, "vision", None),
    ]


async def test_jobs_are_paused_resumed_and_stopped(house: House) -> None:
    watcher = house.watcher
    async with scheduler(house.pool):
        agent = await house.agent("host-1")
        await house.submit()
        await until(lambda: watcher.workers() == 4)
        agent.iteration = 7
        assert await house.ask(JobPause(job_id="job-1")) == Accepted(job_id="job-1")
        await until(lambda: watcher.state() == "paused" and not agent.workers)
        assert await house.ask(JobResume(job_id="job-1")) == Accepted(job_id="job-1")
        await until(lambda: watcher.state() == "running" and len(agent.workers) == 4)
        assert agent.allocations["job-1"].resume
        assert await house.ask(JobStop(job_id="job-1", reason="enough")) == Accepted(job_id="job-1")
        await until(lambda: watcher.state() == "stopped" and not agent.workers)
        assert watcher.records["job-1"].reason == "enough"
        refused = await house.ask(JobPause(job_id="job-1"))
        assert isinstance(refused, Refused)
        assert refused.code == "conflict"


async def test_a_scheduler_that_ends_hands_its_lease_over_at_once(house: House) -> None:
    async with scheduler(house.pool, lease_seconds=60.0):
        await house.submit()
    async with scheduler(house.pool, lease_seconds=60.0):
        await house.submit()
        await until(lambda: len(house.watcher.records) == 2)


async def test_a_killed_scheduler_is_followed_by_the_next_epoch_and_nothing_is_doubled(house: House) -> None:
    watcher = house.watcher
    agent = await house.agent("host-1", slots=2)
    for number in range(1, 4):
        async with as_process(house.pool, "scheduler", "--lease-seconds", "0.5") as process:
            job = await house.submit()
            assert job == f"job-{number}"
            await until(lambda: watcher.state("job-1") == "running" and agent.allocations["job-1"].epoch == number)  # noqa: B023
            process.kill()
    async with scheduler(house.pool, lease_seconds=0.5):
        await until(lambda: agent.allocations["job-1"].epoch == 4)
        await until(lambda: watcher.workers("job-1") == watcher.workers("job-2") == 1)
        await agent.complete("job-1")
        await agent.complete("job-2")
        await until(lambda: watcher.workers("job-3") == 2)
        await agent.complete("job-3")
        await until(lambda: {watcher.state(job) for job in watcher.records} == {"completed"})
        for job in ("job-1", "job-2", "job-3"):
            numbers = await watcher.all_events_of(job)
            assert numbers == list(range(1, len(numbers) + 1))
            assert watcher.kinds(job)[0] == "accepted"
            assert watcher.kinds(job).count("completed") == 1
    orders = [(a.job, a.epoch, a.generation) for a in agent.seen]
    assert all(orders.count(order) <= 2 for order in orders), "allocated, and ordered"


async def test_of_two_schedulers_one_decides(house: House) -> None:
    leading = asyncio.Event()

    async def lead() -> None:
        async with scheduler(house.pool, lease_seconds=60.0):
            leading.set()
            await asyncio.Event().wait()

    async with scheduler(house.pool, lease_seconds=60.0):
        second = asyncio.create_task(lead())
        agent = await house.agent("host-1")
        await house.submit()
        await until(lambda: house.watcher.workers() == 4)
        assert not leading.is_set()
        assert {allocation.epoch for allocation in agent.seen} == {1}
    await until(leading.is_set)
    await house.submit()
    await until(lambda: house.watcher.workers("job-1") == house.watcher.workers("job-2") == 2)
    assert agent.allocations["job-2"].epoch == 2
    second.cancel()
    await asyncio.wait({second})


async def test_a_scheduler_that_stood_still_and_was_replaced_ends_and_changes_nothing(house: House) -> None:
    async with as_process(house.pool, "scheduler", "--lease-seconds", "0.5") as frozen:
        agent = await house.agent("host-1")
        await house.submit()
        await until(lambda: house.watcher.workers() == 4)
        frozen.send_signal(signal.SIGSTOP)
        async with scheduler(house.pool, lease_seconds=0.5):
            await until(lambda: agent.allocations["job-1"].epoch == 2)
            frozen.send_signal(signal.SIGCONT)
            assert await frozen.wait() == 1
            await house.submit()
            await until(lambda: house.watcher.workers("job-2") == 2)
            assert {allocation.epoch for allocation in agent.allocations.values()} == {2}


def idle_host() -> HostRecord:
    return HostRecord(
        host="host-1",
        incarnation=1,
        state=HostState.UP,
        address="h",
        slots=(Slot(index=0),),
        device_class="cpu",
        version=VERSION,
        since=at(0.0),
    )


async def test_the_lease_names_a_report_once_its_effects_are_stored(pool: Pool) -> None:
    """The next leader reads on behind the newest report that the lease names: what an earlier one changed is stored."""
    bus = await pool.bus("scheduler")
    settings = SchedulerSettings(credentials=pool.server.credentials("scheduler"))
    lease = Lease(bus.bucket(LEASE), holder="leader", seconds=60.0)
    await lease.acquire()
    async with asyncio.TaskGroup() as group:
        context = ServiceContext("scheduler", settings, bus)
        service = resile_scheduler.service._Service(
            context, PoolSettings(detection_seconds=3.0, version=VERSION), lease, group
        )
        await service._executor.read()
        for event in (idle_host(), Heartbeat(host="host-1", incarnation=1, number=1), JobSubmitted("id", spec())):
            service._handle(event)
        service._executor.answer_to("id")
        warned = Report(
            job="job-1",
            host="host-1",
            incarnation=1,
            worker=0,
            slot=0,
            generation=0,
            time=at(0.0),
            content=Warned(message="this may be wrong"),
        )
        reading = group.create_task(service._on_report(Received(warned, "", "", "", "", sequence=7)))
        await bus.round_trip()
        assert lease.position == 0
        executing = group.create_task(service._executor.run())
        await reading
        assert lease.position == 7
        executing.cancel()
    stored = await bus.bucket(JOBS).get("job-1")
    assert stored is not None
    assert stored.value.warnings == ("this may be wrong",)


async def test_jobs_go_on_after_an_outage_of_the_bus(house: House) -> None:
    async with scheduler(house.pool):
        agent = await house.agent("host-1")
        await house.submit()
        await until(lambda: house.watcher.workers() == 4)
        await house.pool.crash()
        await house.submit()
        await until(lambda: house.watcher.workers("job-1") == house.watcher.workers("job-2") == 2)
        await agent.complete("job-2")
        await until(lambda: house.watcher.workers("job-1") == 4 and house.watcher.state("job-2") == "completed")
        numbers = await house.watcher.all_events_of()
        assert numbers == list(range(1, len(numbers) + 1))


async def test_a_lost_host_takes_its_workers_with_it(house: House) -> None:
    async with scheduler(house.pool):
        await house.agent("host-1")
        other = await house.agent("host-2")
        await house.submit(max_workers=4)
        await house.submit(max_workers=4)
        await until(lambda: house.watcher.workers("job-1") == house.watcher.workers("job-2") == 4)
        (lost,) = {job for job, _ in other.workers}
        await other.vanish()
        await until(lambda: any("host-2 lost" in item.reason for item in house.watcher.history(lost)))
        await until(lambda: house.watcher.workers("job-1") == house.watcher.workers("job-2") == 2)


async def test_a_job_that_loses_a_host_goes_on_with_its_other_members(house: House) -> None:
    async with scheduler(house.pool):
        first = await house.agent("host-1")
        second = await house.agent("host-2")
        await house.submit()
        await until(lambda: house.watcher.workers() == 8)
        await second.vanish()
        await until(lambda: house.watcher.workers() == 4 and house.watcher.state() == "running")
        assert house.watcher.history()[-1].reason == "host-2 lost"
        assert [allocation.is_recovery for allocation in first.seen][-1]


async def test_an_accused_worker_whose_agent_answers_stays(house: House) -> None:
    async with scheduler(house.pool):
        first = await house.agent("host-1")
        second = await house.agent("host-2")
        await house.submit()
        await until(lambda: house.watcher.workers() == 8)
        await accuse(first, second)
        await until(lambda: second.num_heartbeats_requested == 1)
        await house.submit()
        await until(lambda: house.watcher.workers("job-2") == 4)
        assert not any(allocation.is_recovery for allocation in first.seen)


async def test_an_accused_worker_whose_agent_is_silent_is_evicted_before_its_host_is_lost(house: House) -> None:
    async with scheduler(house.pool):
        first = await house.agent("host-1")
        second = await house.agent("host-2")
        await house.submit()
        await until(lambda: house.watcher.workers() == 8)
        await second.vanish()
        await accuse(first, second)
        await until(lambda: house.watcher.workers() == 4)
        reasons = [item.reason for item in house.watcher.history() if item.kind == "allocation"]
        assert reasons[-1] == "host-2 does not answer"


async def test_the_loss_of_a_host_is_one_trace_from_the_first_suspicion_to_the_registry(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the scheduler finds by asking the host, and the registry by missing its heartbeats."""
    spans = KeptSpans(monkeypatch)
    async with scheduler(house.pool):
        first = await house.agent("host-1")
        second = await house.agent("host-2")
        await house.submit()
        await until(lambda: house.watcher.workers() == 8)
        await second.vanish()
        with traced("worker suspected"):
            await accuse(first, second)
        await until(lambda: {span.name for span in spans.ended} >= {"host lost", "host changed"})
    (suspected,) = [span for span in spans.ended if span.name == "worker suspected"]
    failed = [span for span in spans.ended if span.status.status_code is trace.StatusCode.ERROR]
    assert {span.context.trace_id for span in failed} == {suspected.context.trace_id}
    assert {str((span.attributes or {})["error.type"]) for span in failed} == {"host lost"}
    assert {span.name for span in failed} >= {"host lost"}
    assert len(failed) == 2, "the scheduler's decision and the registry's"


async def accuse(agent: FakeAgent, other: FakeAgent) -> None:
    """Let a worker of ``agent`` report that one of ``other`` did not take part."""
    (job, accuser), (_, suspect) = min(agent.workers), min(other.workers)
    await agent.report(
        job, accuser, PeerSuspected(suspect=suspect, evidence="broken link", reason="the connection broke")
    )


async def test_garbage_is_answered_or_laid_aside_and_the_service_lives(house: House) -> None:
    letters: list[DeadLetter] = []

    async def note(received: Received[DeadLetter]) -> None:
        letters.append(received.message)

    following = asyncio.create_task(house.watcher.bus.follow(DEAD_LETTERS, DeadLetter, note))
    learner = await house.pool.bus("learner", service="garbage")
    async with scheduler(house.pool):
        raw = house.publisher.connection
        for verb in ("submit", "priority", "stop", "pause", "resume", "unheard-of"):
            reply = await raw.request(subjects.command("job", verb), b"\xff{", headers={"ce-specversion": "1.0"})
            assert b"refused" in reply.data
        assert isinstance(await house.ask(JobStop(job_id="job-9")), Refused)
        for subject in (subjects.heartbeat("host-1"), subjects.report("job-1", "ready")):
            await learner.connection.send(subject, b"[1, 2", headers={})
        await until(lambda: {letter.subject for letter in letters} >= GARBAGE)
        assert await house.submit() == "job-1"
    following.cancel()


async def test_a_report_that_cannot_be_handled_costs_its_job_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is laid aside, and no later scheduler reads it again; the next job trains."""
    raised: list[str] = []
    handle = WorkerReports.handle

    def superstitious(self: WorkerReports, report: Report, *, now: float) -> None:
        handle(self, report, now=now)
        if isinstance(report.content, Ready) and report.content.num_shards == UNLUCKY:
            raised.append(report.job)
            raise ValueError(f"{UNLUCKY} shards")

    monkeypatch.setattr(WorkerReports, "handle", superstitious)
    watcher, spans = house.watcher, KeptSpans(monkeypatch)
    async with scheduler(house.pool, lease_seconds=0.5):
        await house.agent("host-1", slots=1, num_shards=UNLUCKY)
        assert await house.submit() == "job-1"
        await until(lambda: watcher.state() == "failed")
        await until(lambda: "job failed" in [kind for _, kind, _ in spans.errors])
        assert f"ValueError: {UNLUCKY} shards" in watcher.history()[-1].reason
        await until_laid_aside(watcher.bus, subjects.report("job-1", "ready"))
        agent = await house.agent("host-2")
        assert await house.submit(min_workers=4, max_workers=4) == "job-2"
        await until(lambda: watcher.state("job-2") == "running")
    async with scheduler(house.pool, lease_seconds=0.5):
        await agent.complete("job-2")
        await until(lambda: watcher.state("job-2") == "completed")
    assert raised == ["job-1"]


async def test_a_request_that_cannot_be_handled_is_refused_and_leaves_no_trace(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = JobCommands.submit

    def superstitious(self: JobCommands, event: JobSubmitted, *, now: float) -> Accepted | Refused:
        answer = submit(self, event, now=now)
        if event.spec.name == "unlucky":
            raise ValueError("an unlucky name")
        return answer

    monkeypatch.setattr(JobCommands, "submit", superstitious)
    async with scheduler(house.pool):
        subject = subjects.command("job", "submit")
        answer = await house.publisher.ask(subject, JobSubmit(spec=spec(name="unlucky")))
        assert isinstance(answer, Refused)
        assert "ValueError: an unlucky name" in answer.reason
        assert await house.submit() == "job-1"
        await house.agent("host-1")
        await until(lambda: house.watcher.state() == "running")


async def until_laid_aside(bus: Bus, subject: str) -> None:
    """Wait until a message of ``subject`` is among the dead letters."""
    laid_aside = asyncio.Event()

    async def note(received: Received[DeadLetter]) -> None:
        if received.message.subject == subject:
            laid_aside.set()

    following = asyncio.create_task(bus.follow(DEAD_LETTERS, DeadLetter, note))
    await laid_aside.wait()
    following.cancel()


UNLUCKY = 13
GARBAGE = {
    "resile.command.job.unheard-of",
    "resile.command.job.submit",
    "resile.heartbeat.host-1",
    "resile.report.job-1.ready",
}


async def test_the_leader_explains_its_newest_decision(house: House) -> None:
    monitor = await house.pool.bus("monitor")

    async def explanations() -> JobExplanations | None:
        return await monitor.query(subjects.EXPLAIN_JOBS, ExplainJobs(), JobExplanations, seconds=30)

    assert await explanations() is None, "no scheduler leads yet"
    async with scheduler(house.pool):
        await house.agent("host-1")
        await house.submit(max_workers=1)
        await until(lambda: house.watcher.workers("job-1") == 1)
        assert await explanations() == JobExplanations(reasons={"job-1": "all it can use"})


async def test_no_result_is_missed_that_waits_to_be_read(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus that is slow to store keeps the scheduler busy with other reports for longer than it waits for a result."""
    execute = Executor._execute

    async def execute_slowly(executor: Executor, batch: Batch) -> None:
        await asyncio.sleep(0.1)
        await execute(executor, batch)

    monkeypatch.setattr(Executor, "_execute", execute_slowly)
    monkeypatch.setattr(resile_scheduler.service, "TICK_SECONDS", 0.2)
    monkeypatch.setattr(resile_scheduler.service, "SETTLE_TICKS", 1)
    monkeypatch.setattr(resile_scheduler.core.losses.recovery, "RESULT_SECONDS", 0.5)
    async with scheduler(house.pool):
        agent = await house.agent("host-1")
        await house.submit()
        await until(lambda: house.watcher.state() == "running")
        for number in range(20):
            await agent.report("job-1", 0, Warned(message=f"warning {number}"))
        await agent.complete("job-1")
        await until(lambda: house.watcher.state() == "completed")
        assert house.watcher.state() == "completed"


async def test_a_trace_goes_from_the_submission_to_the_allocation(house: House) -> None:
    set_up_tracing("test")
    async with scheduler(house.pool):
        agent = await house.agent("host-1")
        await house.submit(max_workers=1)
        await until(lambda: house.watcher.workers("job-1") == 1)
        async with aclosing(agent.bus.bucket(ALLOCATIONS).watch()) as changes:
            assert len(await anext(changes)) == 1
            with traced("submit") as span:
                await house.submit()
            (change,) = await anext(changes)
    assert change.key == "job-2"
    assert change.headers["traceparent"].split("-")[1] == trace.format_trace_id(span.get_span_context().trace_id)


async def test_a_long_history_leaves_the_record_small_and_is_whole(house: House) -> None:
    """Whatever happens to a job, and whichever scheduler leads, its record has the same size."""
    sizes = []
    for first in (6000, 7000):
        async with scheduler(house.pool):
            if not sizes:
                assert await house.submit() == "job-1"
            for priority in range(first, first + 80):
                await house.ask(JobPriority(job_id="job-1", priority=priority))
                await until(lambda wanted=priority: house.watcher.records["job-1"].priority == wanted)  # type: ignore[misc]
            published = house.watcher.records["job-1"].model_copy(update={"unpublished": ()})
            sizes.append(len(published.model_dump_json()))
            history = await check_history(house.pool, house.watcher.records["job-1"])  # while one is there to publish
    assert sizes[1] - sizes[0] < 500
    assert [item.kind for item in history].count("priority") == 160


async def test_a_job_that_ends_while_the_bus_refuses_records_is_recorded_as_ended_once_it_can_be(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resile_scheduler.executor, "RETRY_SECONDS", 0.05)
    async with scheduler(house.pool):
        bus = await house.pool.bus("scheduler")
        agent = await house.agent("host-1")
        await house.submit()
        await until(lambda: house.watcher.state() == "running")
        await limit_records(bus, max_bytes=10)
        await agent.complete("job-1")
        await until(lambda: not agent.workers)
        assert house.watcher.state() == "running"
        await limit_records(bus, max_bytes=-1)
        await until(lambda: house.watcher.state() == "completed")
        await check_history(house.pool, house.watcher.records["job-1"])


@asynccontextmanager
async def with_small_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """A pool whose bus takes smaller messages than that of `resile up`."""
    monkeypatch.setattr(nats_server, "MAX_PAYLOAD_BYTES", 64 << 10)
    async with AsyncExitStack() as stack:
        server = NatsServer(tmp_path / "small")
        await server.start()
        stack.push_async_callback(server.stop)
        pool = Pool(server, await stack.enter_async_context(AsyncExitStack()))
        yield await stack.enter_async_context(furnished(pool))


async def run_large_and_small(house: House) -> tuple[str, str]:
    """Submit a job whose record nearly fills a message, and another one; return them when both train."""
    large = await house.submit(args=("x" * 40_000,), max_workers=2)
    small = await house.submit(max_workers=2)
    await until(lambda: {house.watcher.state(job) for job in (large, small)} == {"running"})
    return large, small


async def test_a_job_that_the_bus_refuses_to_store_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_small_messages(tmp_path, monkeypatch) as house:
        async with scheduler(house.pool):
            agent = await house.agent("host-1")
            large, small = await run_large_and_small(house)
            for number in range(20):
                if (large, 0) in agent.workers:  # its job fails as soon as one is too much
                    await agent.report(large, 0, Warned(message=f"{number} {'y' * 1900}"))
            await until(lambda: house.watcher.state(large) == "failed")
            await agent.complete(small, epochs=700)
            await until(lambda: house.watcher.state(small) == "completed")
            assert "exceeds the maximum message size" in house.watcher.records[large].reason
            assert await house.submit() == "job-3"
            await check_history(house.pool, house.watcher.records[large])
        async with scheduler(house.pool):
            assert await house.submit() == "job-4"


async def test_a_job_whose_result_the_bus_refuses_to_store_completes_without_its_details(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_small_messages(tmp_path, monkeypatch) as house, scheduler(house.pool):
        agent = await house.agent("host-1")
        large, small = await run_large_and_small(house)
        for job in (large, small):
            await agent.complete(job, epochs=700)
        await until(lambda: {house.watcher.state(job) for job in (large, small)} == {"completed"})
        await until(lambda: "warning" in house.watcher.kinds(large))
        results = [house.watcher.records[job].completed for job in (large, small)]
        assert [len(result.ledger) for result in results if result is not None] == [0, 700]
        (warning,) = [item.reason for item in house.watcher.history(large) if item.kind == "warning"]
        assert warning.startswith("the ledger and the metrics of its result cannot be stored: ")
        await check_history(house.pool, house.watcher.records[large])
