"""People who submit jobs and change their minds, over the same requests that the API sends."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count

import orjson
from pydantic import BaseModel

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.subjects import JOBS, LEASE, LEASE_KEY
from resile_shared.messages.commands import (
    Accepted,
    HostDrain,
    HostUndrain,
    JobDelete,
    JobPause,
    JobPriority,
    JobResume,
    JobStop,
    JobSubmit,
    PoolPolicy,
    PoolSuspend,
    Refused,
    TenantDelete,
    TenantSet,
)
from resile_shared.messages.jobs import JobRecord, JobSpec, JobState
from resile_shared.policies import PolicyName

from .loop import START, Process, SimLoop
from .plan import SHARING, Action, Plan, Submission
from .services import open_bus

NUM_PACKAGES = 3
"""Some jobs have the same package."""
RESUME_SECONDS = 5.0
SUSPEND_SECONDS = 5.0
SUSPEND_ATTEMPTS = 30
UPLOAD_SECONDS = 2.0
"""What it takes to upload a package again, which was removed with the last job that had it."""
DELETE_SECONDS = 1.0
"""Between two attempts to delete a job that has not ended."""
SAVED_SECONDS = 20.0
"""Within so long a calm pool saves jobs whose scripts do not hang."""


class Users:
    """The users of one world. ``jobs`` are those that were accepted, by their number in the plan."""

    def __init__(
        self,
        loop: SimLoop,
        plan: Plan,
        *,
        on_suspended: Callable[[], None],
        change_settings: Callable[[int], None],
        upload: Callable[[str], None],
        on_changed: Callable[[str], None],
    ) -> None:
        """``on_suspended`` is called when the pool is suspended, or does not answer, to be ended and started again.

        ``change_settings`` starts the pool again with other settings, which a number chooses. ``upload`` stores a
        package. ``on_changed`` is called with the id of each request that has changed the policy or a tenant.
        """
        self.jobs: dict[int, str] = {}
        self.stopped: set[str] = set()
        """Jobs that somebody asked to be stopped."""
        self.drained: set[str] = set()
        self.unstored: set[str] = set()
        """Jobs that the bus has refused to store."""
        self.deleted: set[str] = set()
        """Jobs that somebody asks to be deleted as soon as they have ended."""
        self.removed: set[str] = set()
        """Jobs of which the users saw last that they are gone."""
        self.capped: set[str] = set()
        """Tenants whose jobs may get no more slots than somebody has said."""
        self.refused: list[str] = []
        """What no request should have led to."""
        self.records: dict[str, JobRecord] = {}
        """What the users saw of the jobs last, after `begin_calm`."""
        self._loop = loop
        self._plan = plan
        self._on_suspended = on_suspended
        self._change_settings = change_settings
        self._upload = upload
        self._on_changed = on_changed
        self._process = Process(loop, "users")
        self._bus: Bus | None = None
        self._num_requests = 0
        self._restarted_at = 0.0
        """When somebody ended the pool last: what others wait for begins anew then."""
        self._process.spawn(self._begin())

    def act(self, action: Action) -> None:
        """Do what ``action`` says to some job or host."""
        known = sorted(self.jobs.values())
        if action.kind == "drain":
            host = f"host-{action.target % len(self._plan.slots) + 1}"
            self.drained.add(host)
            self._ask("host.drain", HostDrain(host_id=host, deadline_seconds=float(action.value % 7)))
        elif action.kind == "submit again":
            number = action.target % len(self._plan.jobs)
            if number in self.jobs and not self._may_be_gone(self.jobs[number]):
                self._process.spawn(self._submit(number, self._plan.jobs[number]))
        elif action.kind in (*SHARING, "cap", "delete tenant"):
            self._change_sharing(action)
        elif action.kind == "settings":
            self._change_settings(action.target)
        elif action.kind == "restart pool":
            self._process.spawn(self._restart_pool())
        elif known:
            self._change_job(known[action.target % len(known)], action)

    def _change_job(self, job: str, action: Action) -> None:
        match action.kind:
            case "pause":
                self._ask("job.pause", JobPause(job_id=job))
            case "resume":
                self._ask("job.resume", JobResume(job_id=job))
            case "delete":
                self.deleted.add(job)
                self._process.spawn(self._delete(job))
            case "stop":
                self.stopped.add(job)
                self._ask("job.stop", JobStop(job_id=job))
            case "priority":
                self._ask("job.priority", JobPriority(job_id=job, priority=action.value))

    def _change_sharing(self, action: Action) -> None:
        """Change how the pool shares its slots."""
        match action.kind:
            case "policy":
                policies = list(PolicyName)
                self._ask("pool.policy", PoolPolicy(policy=policies[action.target % len(policies)]))
            case "preemption":
                self._ask("pool.policy", PoolPolicy(preemption=action.target % 3 > 0))
            case "cap":
                tenant, cap = self._tenant(action), action.target % sum(self._plan.slots) + 1
                self.capped.add(tenant)
                self._ask("tenant.set", TenantSet(tenant_id=tenant, quota=0, cap=cap))
            case "tenant":
                tenant, quota = self._tenant(action), action.target % sum(self._plan.slots)
                self._ask("tenant.set", TenantSet(tenant_id=tenant, weight=action.target % 5 + 1, quota=quota))
            case "delete tenant":
                self._ask("tenant.delete", TenantDelete(tenant_id=self._tenant(action)))

    def _tenant(self, action: Action) -> str:
        tenants = sorted({submission.tenant for submission in self._plan.jobs})
        return tenants[action.target % len(tenants)]

    def _may_be_gone(self, job: str) -> bool:
        """Whether a job may be removed, so that nobody knows of it any more."""
        return self._plan.removes or job in self.deleted

    def undrain(self, host: str) -> None:
        """Let a host take workers again."""
        self._ask("host.undrain", HostUndrain(host_id=host))

    def begin_calm(self) -> None:
        """Watch the jobs from now on, and resume those that are paused. Lift the caps that jobs may not fit in."""
        for tenant in sorted(self.capped):
            self._ask("tenant.set", TenantSet(tenant_id=tenant, cap=0))
        self._process.spawn(self._resume_all())

    @property
    def are_satisfied(self) -> bool:
        """Whether every job of the plan was accepted, and has ended."""
        ended = {job for job, record in self.records.items() if record.state.is_final}
        ended = (ended - self.deleted) | self.removed
        return len(self.jobs) == len(self._plan.jobs) and ended.issuperset(self.jobs.values())

    async def _begin(self) -> None:
        self._bus = await open_bus("monitor")
        for number, submission in enumerate(self._plan.jobs):
            self._loop.call_at(submission.at, self._spawn_submit, number, submission)

    def _spawn_submit(self, number: int, submission: Submission) -> None:
        self._process.spawn(self._submit(number, submission))

    async def _submit(self, number: int, submission: Submission) -> None:
        spec = JobSpec(
            name=f"job {number}",
            package=f"packages/{number % NUM_PACKAGES:064x}.tar.gz",
            script="train.py",
            args=(orjson.dumps(submission.script).decode(),),
            min_workers=submission.min_workers,
            max_workers=submission.max_workers,
            priority=submission.priority,
            group=submission.group,
            gang=submission.gang,
            restartable=submission.restartable,
            tenant=submission.tenant,
            sizes=submission.sizes,
            deadline=self._deadline(submission),
            requirements=submission.packages.requirements if submission.packages else (),
        )
        assert self._bus is not None
        for attempt in count():
            self._upload(spec.package)
            request, message_id = JobSubmit(spec=spec), f"submit {number}{f' {attempt}' * bool(attempt)}"
            match await self._bus.ask(subjects.command("job", "submit"), request, message_id=message_id):
                case Accepted(job_id=str(job)):
                    assert self.jobs.setdefault(number, job) == job, "a submission that is repeated is the same job"
                case Refused(code="conflict", reason=reason) if "its package is being removed" in reason:
                    await asyncio.sleep(UPLOAD_SECONDS)
                    continue
                case Refused(code=code, reason=reason) if code != "unavailable" or not self.unstored:
                    self.refused.append(f"submission {number} was refused: {reason}")
            return

    def _deadline(self, submission: Submission) -> datetime | None:
        if submission.deadline_seconds is None:
            return None
        return datetime.fromtimestamp(START + submission.at + submission.deadline_seconds, UTC)

    def _ask(self, what: str, request: BaseModel) -> None:
        self._num_requests += 1
        self._process.spawn(self._send(what, request, f"request {self._num_requests}"))

    async def _send(self, what: str, request: BaseModel, message_id: str) -> Accepted | Refused | None:
        if self._bus is None:
            return None
        answer = await self._bus.ask(subjects.command(*what.split(".")), request, message_id=message_id)
        if isinstance(answer, Accepted) and isinstance(request, PoolPolicy | TenantSet | TenantDelete):
            self._on_changed(message_id)
        if isinstance(answer, Refused) and answer.code == "unknown" and self._is_known(request):
            self.refused.append(f"{message_id}, {request}: {answer.reason}")
        return answer

    def _is_known(self, request: BaseModel) -> bool:
        """Whether what ``request`` is about is there."""
        if isinstance(request, HostDrain | HostUndrain | TenantDelete):
            return False
        return not self._may_be_gone(getattr(request, "job_id", ""))

    async def _delete(self, job: str) -> None:
        """Delete a job once it has ended."""
        self._num_requests += 1
        number = self._num_requests
        for attempt in count():
            answer = await self._send("job.delete", JobDelete(job_id=job), f"request {number} {attempt}")
            if isinstance(answer, Accepted) or (isinstance(answer, Refused) and answer.code == "unknown"):
                return
            await asyncio.sleep(DELETE_SECONDS)

    async def _restart_pool(self) -> None:
        """What ends a pool does: saves its jobs, as long as somebody answers, and ends all services."""
        self._num_requests += 1
        jobs: tuple[str, ...] = ()
        begun = self._loop.now
        for attempt in range(SUSPEND_ATTEMPTS):
            with suppress(TimeoutError):
                async with asyncio.timeout(SUSPEND_SECONDS):
                    answer = await self._suspend(f"end {self._num_requests} {attempt}")
                jobs = answer.jobs if isinstance(answer, Accepted) else jobs
                if isinstance(answer, Accepted) and not jobs:
                    break
            await asyncio.sleep(SUSPEND_SECONDS / 5)
        seconds = self._loop.now - max(begun, self._plan.calm_at, self._restarted_at)
        is_stalling = any(submission.script.hangs_at is not None for submission in self._plan.jobs)
        is_stalling |= any(fault.kind == "damaged storage" for fault in self._plan.faults)  # a start may wait for it
        if jobs and seconds >= SAVED_SECONDS and not is_stalling:
            self.refused.append(f"the pool was asked for {seconds:.0f} seconds to save {', '.join(jobs)}")
        self._restarted_at = self._loop.now
        self._on_suspended()

    async def _suspend(self, message_id: str) -> Accepted | Refused | None:
        """Ask the scheduler that leads, as the API does."""
        assert self._bus is not None
        lease = await self._bus.bucket(LEASE).get(LEASE_KEY)
        return await self._send("pool.suspend", PoolSuspend(epoch=lease.value.epoch), message_id) if lease else None

    async def _resume_all(self) -> None:
        assert self._bus is not None
        due: dict[str, float] = {}
        async for changes in self._bus.bucket(JOBS).watch():
            for change in changes:
                if change.value is None:
                    self.removed.add(change.key)
                    self.records.pop(change.key, None)
                    continue
                self.records[change.key] = change.value
                if change.value.state is JobState.PAUSED:  # perhaps by a request that was waiting for an answer
                    at = max(self._loop.now, due.get(change.key, 0.0))
                    due[change.key] = at + RESUME_SECONDS
                    self._loop.call_at(at, self._ask, "job.resume", JobResume(job_id=change.key))
