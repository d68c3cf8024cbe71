"""What people ask for reaches scheduler and registry, and their answers come back."""

import asyncio
from typing import Any

from resile_monitor.openapi import OPERATIONS
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import (
    HOST_COMMANDS,
    JOB_COMMANDS,
    LEASE,
    LEASE_KEY,
    POLICY,
    POLICY_KEY,
    POOL_COMMANDS,
    TENANT_COMMANDS,
    TENANTS,
    TENANTS_KEY,
)
from resile_shared.http.api import Empty, JobList, JobView, PolicyView, Submission, TenantList
from resile_shared.messages.commands import Accepted, JobSubmit, PoolSuspend, Refused
from resile_shared.messages.jobs import JobSpec, JobState
from resile_shared.messages.pool import Lease, PolicyRecord, TenantShare, TenantsRecord
from resile_shared.policies import PolicyName
from resile_testing.waiting import PATIENCE_SECONDS

from .examples import PACKAGE, SPEC, host, job
from .monitors import Monitor, Monitors, Scene

BODY = SPEC.model_dump(mode="json")


class Answering:
    """Answers as scheduler and registry, and remembers what was asked."""

    def __init__(self, scene: Scene) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refuse: Refused | None = None
        self._scene = scene

    async def listen(self) -> None:
        for commands in (JOB_COMMANDS, POOL_COMMANDS, TENANT_COMMANDS):
            await self._scene.scheduler.answer(commands, model_of, self._answer)
        await self._scene.registry.answer(HOST_COMMANDS, model_of, self._answer)

    async def _answer(self, received: Received[Any]) -> Accepted | Refused:
        self.asked.append((received.subject.removeprefix("resile.command."), received.message.model_dump()))
        if self.refuse:
            return self.refuse
        if isinstance(received.message, JobSubmit):
            name = f"job-{len(self.asked)}"
            await self._scene.store_job(job(name, spec=received.message.spec))
            return Accepted(job_id=name)
        if isinstance(received.message, PoolSuspend):
            return Accepted(jobs=("job-1", "job-2"))
        return Accepted(job_id=getattr(received.message, "job_id", None))


async def test_a_submitted_job_is_seen_at_once_and_the_same_key_submits_once(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    monitors.storage.put(PACKAGE, [b""])
    monitor = await monitors.start()
    status, answer = await monitor.post("/v1/jobs", BODY, headers={"Idempotency-Key": "one"})
    assert (status, Submission.model_validate(answer)) == (201, Submission(id="job-1"))
    assert (await monitor.get("/v1/jobs/job-1", JobView)).args == SPEC.args
    assert await monitor.get("/v1/jobs/job-1/spec", JobSpec) == SPEC
    assert await monitor.post("/v1/jobs", BODY, headers={"Idempotency-Key": "one"}) == (201, answer)
    assert await monitor.post("/v1/jobs", BODY) == (201, {"id": "job-2", "warning": ""})


async def test_a_key_counts_for_one_request_alone(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    monitors.storage.put(PACKAGE, [b""])
    monitor = await monitors.start()
    key = {"headers": {"Idempotency-Key": "the key of a script"}}
    assert (await monitor.post("/v1/jobs", BODY, **key))[0] == 422
    key = {"headers": {"Idempotency-Key": "the-key-of-a-script"}}
    await monitor.post("/v1/jobs", BODY, **key)
    assert await monitor.post("/v1/jobs/job-1/pause", **key) == (200, {})
    assert await monitor.post("/v1/jobs/job-1/resume", **key) == (200, {})
    assert [name for name, _ in answering.asked] == ["job.submit", "job.pause", "job.resume"]


async def test_the_document_lists_the_key_where_it_counts(monitors: Monitors, scene: Scene) -> None:
    """There, and only there, a key that is none is refused."""
    answering = Answering(scene)
    await answering.listen()
    monitors.storage.put(PACKAGE, [b""])
    await scene.store_job(job("job"))
    await scene.store_host(host("host"))
    monitor = await monitors.start()
    bodies: dict[str, object] = {
        "/v1/jobs": BODY,
        "/v1/jobs/{job}/priority": {"priority": 7000},
        "/v1/policy": {"policy": "fifo"},
        "/v1/tenants/{tenant}": {"quota": 1},
        "/v1/webhooks": {"url": "http://127.0.0.1:1/"},
    }
    for operation in OPERATIONS:
        if operation.method != "get":
            path = operation.path.replace("{", "").replace("}", "")
            options = {"json": bodies.get(operation.path, {}), "headers": {"Idempotency-Key": "a b"}}
            async with monitor.http.request(operation.method, path, **options) as answer:
                is_checked = "Idempotency-Key must be" in await answer.text()
            assert is_checked == operation.is_keyed, (operation.method, operation.path)


async def test_every_command_arrives_as_it_was_asked(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    await scene.store_job(job())
    await scene.store_host(host())
    monitor = await monitors.start()
    for path, body in (
        ("/v1/jobs/job-1/priority", {"priority": 7000}),
        ("/v1/jobs/job-1/stop", {"reason": "enough"}),
        ("/v1/jobs/job-1/stop", None),
        ("/v1/jobs/job-1/pause", {}),
        ("/v1/jobs/job-1/resume", {}),
        ("/v1/hosts/host-1/drain", {"deadline_seconds": 5}),
        ("/v1/hosts/host-1/drain", {"deadline_seconds": None}),
        ("/v1/hosts/host-1/undrain", None),
    ):
        async with monitor.http.post(path, json=body) if body is not None else monitor.http.post(path) as answer:
            assert answer.status == 200, await answer.text()
            Empty.model_validate_json(await answer.read())
    assert answering.asked == [
        ("job.priority", {"job_id": "job-1", "priority": 7000}),
        ("job.stop", {"job_id": "job-1", "reason": "enough"}),
        ("job.stop", {"job_id": "job-1", "reason": ""}),
        ("job.pause", {"job_id": "job-1"}),
        ("job.resume", {"job_id": "job-1"}),
        ("host.drain", {"host_id": "host-1", "deadline_seconds": 5.0}),
        ("host.drain", {"host_id": "host-1", "deadline_seconds": None}),
        ("host.undrain", {"host_id": "host-1"}),
    ]


async def test_a_job_that_is_deleted_is_gone_at_once(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    await scene.store_job(job(state=JobState.COMPLETED))
    monitor = await monitors.start()
    async with monitor.http.delete("/v1/jobs/job-1") as answer:
        assert answer.status == 200, await answer.text()
    assert answering.asked == [("job.delete", {"job_id": "job-1"})]
    await scene.store_job(job(state=JobState.COMPLETED, is_deleted=True))  # as the scheduler does before it answers
    await until_unknown(monitor)
    assert (await monitor.problem("DELETE", "/v1/jobs/job-1")).status == 404


async def test_deleting_again_with_the_same_key_has_the_same_answer(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    await scene.store_job(job(state=JobState.COMPLETED))
    monitor = await monitors.start()
    for _ in range(2):
        async with monitor.http.delete("/v1/jobs/job-1", headers={"Idempotency-Key": "one"}) as answer:
            assert (answer.status, await answer.json()) == (200, {})
        await scene.store_job(job(state=JobState.COMPLETED, is_deleted=True))
        await until_unknown(monitor)
    assert answering.asked == [("job.delete", {"job_id": "job-1"})]
    problem = await monitor.problem("DELETE", "/v1/jobs/a.b", headers={"Idempotency-Key": "two"})
    assert problem.status == 422


async def until_unknown(monitor: Monitor) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await monitor.get("/v1/jobs", JobList)).jobs:  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.02)


async def test_what_is_refused_says_why(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    await scene.store_job(job())
    monitor = await monitors.start()
    for code, status in (
        ("malformed", 400),
        ("invalid", 422),
        ("unknown", 404),
        ("conflict", 409),
        ("unavailable", 503),
    ):
        answering.refuse = Refused(code=code, reason=f"it is {code}")
        problem = await monitor.problem("POST", "/v1/jobs/job-1/pause")
        assert (problem.status, problem.code, problem.detail) == (status, code, f"it is {code}")


async def test_a_job_without_its_package_is_refused_before_anybody_is_asked(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    monitors.storage.put("secret", [b""])
    for package in (PACKAGE, "secret", "packages/../secret", "/etc/passwd"):
        problem = await monitor.problem("POST", "/v1/jobs", json=BODY | {"package": package})
        assert (problem.status, problem.code) == (422, "invalid")
        assert f"there is no package {package}" in problem.detail


async def test_a_scheduler_that_is_away_is_told_as_such(monitors: Monitors, scene: Scene) -> None:
    monitors.storage.put(PACKAGE, [b""])
    monitor = await monitors.start()
    problem = await monitor.problem("POST", "/v1/jobs", json=BODY, headers={"Idempotency-Key": "one"})
    assert (problem.status, problem.code) == (503, "unavailable")
    assert "the scheduler does not respond" in problem.detail
    assert "the same Idempotency-Key" in problem.detail
    answering = Answering(scene)
    await answering.listen()
    assert await monitor.post("/v1/jobs", BODY, headers={"Idempotency-Key": "one"}) == (
        201,
        {"id": "job-1", "warning": ""},
    )


async def test_who_suspends_the_pool_learns_which_jobs_still_hold_slots(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    monitor = await monitors.start()
    problem = await monitor.problem("POST", "/v1/pool/suspend")
    assert (problem.status, problem.code) == (503, "unavailable")
    await scene.scheduler.bucket(LEASE).create(LEASE_KEY, Lease(epoch=3, holder="scheduler", counter=0))
    assert await monitor.post("/v1/pool/suspend") == (200, {"jobs": ["job-1", "job-2"]})
    assert answering.asked == [("pool.suspend", {"epoch": 3})]


async def test_the_policy_is_changed_and_shown_as_it_is_stored(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    monitor = await monitors.start()
    first = PolicyView(policy=PolicyName.FAIRSHARE, preemption=True)
    assert await monitor.get("/v1/policy", PolicyView) == first, "nobody has changed it"
    await scene.scheduler.bucket(POLICY).create(POLICY_KEY, PolicyRecord(policy=PolicyName.FIFO, preemption=False))
    async with monitor.http.put("/v1/policy", json={"policy": "priority"}) as answer:
        shown = await answer.json()
        assert (answer.status, shown["policy"], shown["preemption"]) == (200, "fifo", False)
        assert list(shown["policies"]) == list(PolicyName)
    assert answering.asked == [("pool.policy", {"policy": PolicyName.PRIORITY, "preemption": None})]
    problem = await monitor.problem("PUT", "/v1/policy", json={"policy": "chaos"})
    assert (problem.status, problem.code) == (422, "invalid")
    for name in PolicyName:
        assert f"'{name}'" in problem.detail


async def test_tenants_are_changed_and_shown_as_they_are_stored(monitors: Monitors, scene: Scene) -> None:
    answering = Answering(scene)
    await answering.listen()
    await scene.store_job(job())
    monitor = await monitors.start()
    default = {"id": "default", "weight": 1, "quota": 0, "cap": 0, "is_configured": False, "jobs": 1, "workers": 2}
    assert (await monitor.get("/v1/tenants", TenantList)).model_dump(mode="json") == {"tenants": [default]}
    stored = TenantsRecord(tenants={"vision": TenantShare(weight=2, quota=3, cap=4)})
    await scene.scheduler.bucket(TENANTS).create(TENANTS_KEY, stored)
    vision = {"id": "vision", "weight": 2, "quota": 3, "cap": 4, "is_configured": True, "jobs": 0, "workers": 0}
    async with monitor.http.put("/v1/tenants/vision", json={"quota": 3}) as answer:
        assert (answer.status, await answer.json()) == (200, {"tenants": [default, vision]})
    async with monitor.http.delete("/v1/tenants/vision") as answer:
        assert answer.status == 200
    assert answering.asked == [
        ("tenant.set", {"tenant_id": "vision", "weight": None, "quota": 3, "cap": None}),
        ("tenant.delete", {"tenant_id": "vision"}),
    ]
    for body in ({"quota": -1}, {"weight": 0}, {"weight": 1.5}, {"quota": 10**9}, {"limit": 3}):
        problem = await monitor.problem("PUT", "/v1/tenants/vision", json=body)
        assert (problem.status, problem.code) == (422, "invalid")
    problem = await monitor.problem("PUT", "/v1/tenants/a%20b", json={"quota": 1})
    assert (problem.status, problem.code) == (422, "invalid")
    assert "tenant_id" in problem.detail
