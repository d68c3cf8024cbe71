"""Environments asked for ahead are built one at a time, kept while they are asked for, and each step is reported."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from resile_learner import environments as module
from resile_learner.agent.environment_builds import EnvironmentBuilds
from resile_learner.agent.host_workers import WorkerContext
from resile_learner.agent.job_environments import JobEnvironments
from resile_learner.environments import Environments
from resile_shared.messages.hosts import EnvironmentReport
from resile_testing.waiting import until

from .wheels import add_slow_source, add_wheel, offline

pytestmark = pytest.mark.long


class Records:
    """The records of jobs, with nothing but what they require."""

    def __init__(self) -> None:
        self.requirements: dict[str, tuple[str, ...]] = {}

    async def get(self, job: str) -> Any:
        if job not in self.requirements:
            return None
        return SimpleNamespace(value=SimpleNamespace(spec=SimpleNamespace(requirements=self.requirements[job])))


class Builder:
    """The builds of a host, and what they report."""

    def __init__(self, folder: Path, **requirements: str) -> None:
        self.folder = folder / "environments"
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.started = folder / "started"
        self.reports: dict[str, list[EnvironmentReport]] = {}
        self.lines: list[tuple[str, int | None, str]] = []
        self.records = Records()
        self.records.requirements = {job: (text,) for job, text in requirements.items()}
        environments = Environments(self.folder, variables={**os.environ, **offline(self.wheels)})
        self.context = SimpleNamespace(
            jobs=self.records,
            environments=JobEnvironments(environments),
            storage_of=lambda job: (folder / "storage" / job).as_uri(),
        )
        self.builds = self.another()

    def another(self) -> EnvironmentBuilds:
        """The builds of another incarnation of the agent."""
        return EnvironmentBuilds(
            cast(WorkerContext, self.context),
            on_line=lambda job, worker, stream, line: self.lines.append((job, worker, line)),
            post=lambda report: self.reports.setdefault(report.job, []).append(report),
        )

    def states(self, job: str) -> list[str]:
        return [report.state for report in self.reports.get(job, ())]

    async def reports_last(self, job: str, state: str) -> EnvironmentReport:
        await until(lambda: state in self.states(job)[-1:])
        return self.reports[job][-1]

    async def builds_slowly(self) -> int:
        """Wait until the package that takes ten minutes is being built; return the process that builds it."""
        await until(lambda: self.started.exists() and self.started.read_text())
        return int(self.started.read_text())


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.nightly
async def test_each_step_is_reported_and_pip_writes_into_the_log_of_no_worker(tmp_path: Path) -> None:
    host = Builder(tmp_path, one="marker<2", two="marker>=2")
    for version in ("1.0", "2.0"):
        add_wheel(host.wheels, "marker", version)
    host.builds.prepare(("one", "two"))
    for job in ("one", "two"):
        await host.reports_last(job, "ready")
        assert host.states(job) == ["building", "ready"]
    assert {("one", None), ("two", None)} == {(job, worker) for job, worker, _ in host.lines}
    await host.builds.close()


async def test_a_job_does_not_wait_for_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its build would never be reported."""
    host = Builder(tmp_path, damaged="marker", unforeseen="marker")
    (tmp_path / "storage/damaged").mkdir(parents=True)
    (tmp_path / "storage/damaged/packages.txt").write_bytes(b"\xff")
    host.builds.prepare(("damaged",))
    report = await host.reports_last("damaged", "failed")
    assert (report.is_hosts_fault, "packages.txt of this job is damaged" in report.reason) == (False, True)

    def fails(self: Environments, *_: object, **__: object) -> bool:
        raise ZeroDivisionError("by a bug")

    monkeypatch.setattr(Environments, "has", fails)
    host.builds.prepare(("unforeseen",))
    report = await host.reports_last("unforeseen", "failed")
    assert report.is_hosts_fault
    assert report.reason == "the environment cannot be prepared: ZeroDivisionError('by a bug')"
    await host.builds.close()


@pytest.mark.nightly
async def test_builds_are_one_at_a_time_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    host = Builder(tmp_path, slow="slow", later="marker", urgent="marker", there="marker==1.0")
    add_slow_source(host.wheels, "slow", started=host.started)
    add_wheel(host.wheels, "marker", "1.0")
    host.builds.prepare(("there",))
    await host.reports_last("there", "ready")
    host.records.requirements |= {"later": ("marker>0",), "urgent": ("marker>=1",)}
    host.builds.prepare(("there", "slow", "later"))
    pid = await host.builds_slowly()
    host.builds.prepare(("there", "slow", "urgent", "later"))
    await until(lambda: host.builds.waiting.keys() == {"urgent", "later"})
    host.builds.prepare(("there", "urgent", "later"))
    await host.reports_last("later", "ready")
    assert list(host.reports) == ["there", "slow", "urgent", "later"]
    await until(lambda: has_ended(pid))
    await host.builds.close()


@pytest.mark.nightly
async def test_a_job_that_is_behind_another_does_not_build_before_that_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Builder(tmp_path, first="first", second="second")
    add_wheel(host.wheels, "first", "1.0")
    add_wheel(host.wheels, "second", "1.0")
    has = JobEnvironments.has

    async def has_slowly(self: JobEnvironments, storage: str, requirements: tuple[str, ...]) -> bool:
        await asyncio.sleep(1.0 if requirements == ("first",) else 0.0)
        return await has(self, storage, requirements)

    monkeypatch.setattr(JobEnvironments, "has", has_slowly)
    host.builds.prepare(("first", "second"))
    await host.reports_last("second", "ready")
    assert list(host.reports) == ["first", "second"]
    await host.builds.close()


async def test_an_environment_that_is_there_is_ready_while_another_is_built(tmp_path: Path) -> None:
    host = Builder(tmp_path, slow="slow", first="marker", second="marker")
    add_slow_source(host.wheels, "slow", started=host.started)
    add_wheel(host.wheels, "marker", "1.0")
    host.builds.prepare(("first",))
    await host.reports_last("first", "ready")
    host.builds.prepare(("slow",))
    await host.builds_slowly()
    host.builds.prepare(("slow", "second"))
    await host.reports_last("second", "ready")
    assert host.states("second") == ["ready"]
    await host.builds.close()


async def test_a_job_that_is_not_asked_for_any_more_is_not_built_and_begun_again_when_it_is(tmp_path: Path) -> None:
    host = Builder(tmp_path, job="slow")
    add_slow_source(host.wheels, "slow", started=host.started)
    host.builds.prepare(("job",))
    pid = await host.builds_slowly()
    host.builds.prepare(())
    await until(lambda: has_ended(pid))
    (host.wheels / "slow-1.0.tar.gz").unlink()
    add_wheel(host.wheels, "slow", "1.0")
    host.builds.prepare(("job",))
    await host.reports_last("job", "ready")
    await host.builds.close()


async def test_a_worker_that_waits_for_the_same_build_keeps_it(tmp_path: Path) -> None:
    host = Builder(tmp_path, job="slow")
    add_slow_source(host.wheels, "slow", started=host.started)
    others = host.another()
    host.builds.prepare(("job",))
    pid = await host.builds_slowly()
    others.prepare(("job",))
    await until(lambda: host.states("job") == ["building", "building"])
    host.builds.prepare(())
    await host.builds.close()
    assert not has_ended(pid)
    await others.close()
    await until(lambda: has_ended(pid))


async def test_a_failure_is_one_line_and_says_whether_another_host_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Builder(tmp_path, wrong="missing==3", killed="marker")
    add_wheel(host.wheels, "marker", "1.0")
    host.builds.prepare(("wrong", "gone"))
    wrong = await host.reports_last("wrong", "failed")
    assert not wrong.is_hosts_fault
    assert "Could not find a version that satisfies the requirement missing==3" in wrong.reason
    assert "\n" not in wrong.reason
    gone = await host.reports_last("gone", "failed")
    assert gone.is_hosts_fault
    assert gone.reason == "no record of job gone is stored"
    monkeypatch.setattr(module, "_complete", _fail)
    host.builds.prepare(("killed",))
    assert (await host.reports_last("killed", "failed")).is_hosts_fault
    await host.builds.close()


def _fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.nightly
async def test_what_is_asked_for_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_ENVIRONMENTS", 1)
    host = Builder(tmp_path, one="marker==1.0", two="marker==2.0", three="marker==3.0")
    for version in ("1.0", "2.0", "3.0"):
        add_wheel(host.wheels, "marker", version)
    for job in ("one", "two"):
        host.builds.prepare(("one", job))
        await host.reports_last(job, "ready")
    assert len(list(host.folder.glob("*/complete"))) == 2
    host.builds.prepare(("three",))
    await host.reports_last("three", "ready")
    assert len(list(host.folder.glob("*/complete"))) == 1
    await host.builds.close()
