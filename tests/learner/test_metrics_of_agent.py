"""What an agent measures is what its core was told and decided."""

from resile_learner.agent.events import StartWorker, Tick, WorkerExited
from resile_learner.agent.metrics import AgentMetrics
from resile_shared.messages.hosts import Heartbeat, WorkerExit, WorkerReport
from resile_shared.messages.message import at
from resile_shared.messages.reports import Content, Progress, Report, Switched
from resile_shared.telemetry.metrics import ServiceMetrics
from resile_testing.samples import samples

BEAT = Tick(is_bus_up=True)


def report(content: Content, *, job: str = "job-1") -> Report:
    return Report(job=job, host="host-1", incarnation=1, worker=0, slot=0, generation=1, time=at(0.0), content=content)


def progress(iteration: int) -> Report:
    return report(Progress(iteration=iteration, epoch=0, iteration_seconds=0.25))


def test_iterations_count_from_the_switch_to_a_generation_and_never_twice() -> None:
    served = ServiceMetrics("learner")
    metrics = AgentMetrics(served.meter)
    for told in (
        report(Switched(workers=(0,), iteration=0)),
        progress(3),
        progress(10),
        report(Switched(workers=(0, 1), iteration=40)),  # others reported from 10 to 40
        progress(41),
        report(Switched(workers=(2,), iteration=20)),  # from its checkpoint
        progress(25),
    ):
        metrics.on_handled(BEAT, [told], num_waiting=0)
    found = samples(served.text())
    assert found["resile_iterations_total"] == 10 + 1 + 5
    assert (found["resile_iteration_seconds_count"], found["resile_iteration_seconds_sum"]) == (4, 1.0)


def test_requests_to_replicas_are_counted_by_their_status() -> None:
    served = ServiceMetrics("learner")
    metrics = AgentMetrics(served.meter)
    metrics.on_handled(Tick(is_bus_up=True, in_flight={("job-1", 0): 1.5, ("job-1", 1): 2.0}), [], num_waiting=0)
    for status in ("ok", "ok", "failed"):
        metrics.on_reply(status)
    found = samples(served.text())
    assert found["resile_requests_in_flight"] == 3.5
    assert (found['resile_requests_total{status="ok"}'], found['resile_requests_total{status="failed"}']) == (2, 1)


def test_workers_are_those_of_the_newest_heartbeat() -> None:
    served = ServiceMetrics("learner")
    metrics = AgentMetrics(served.meter)
    workers = tuple(
        WorkerReport(job="job-1", worker=number, slot=number, state=state)
        for number, state in enumerate(("starting", "member", "member"))
    )
    metrics.on_handled(BEAT, [StartWorker("job-1", 0, 0)], num_waiting=0)
    metrics.on_handled(BEAT, [Heartbeat(host="host-1", incarnation=1, number=1, workers=workers)], num_waiting=7)
    killed = WorkerExited("job-1", 0, WorkerExit(kind="killed", status=-9))
    metrics.on_handled(killed, [], num_waiting=2)
    found = samples(served.text())
    assert found['resile_host_workers{state="member"}'] == 2
    assert found['resile_host_workers{state="left"}'] == 0
    assert found["resile_heartbeats_sent_total"] == found["resile_workers_started_total"] == 1
    assert found['resile_worker_exits_total{kind="killed"}'] == 1
    assert found["resile_agent_reports_waiting"] == 2
