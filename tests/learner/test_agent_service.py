"""A real agent on a real bus, with real workers: it does what allocations say, and tells all that happens."""

import asyncio
import os
import signal
import subprocess
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest_asyncio
from opentelemetry import trace

from resile_shared.bus import subjects
from resile_shared.bus.envelope import Received
from resile_shared.bus.subjects import REPORTS
from resile_shared.errors import UsageError
from resile_shared.messages.hosts import HostState
from resile_shared.messages.instructions import Instruction, StopWorkers
from resile_shared.messages.reports import Report
from resile_shared.telemetry.traces import set_up_tracing, traced
from resile_shared.version import VERSION
from resile_testing.fixtures import Pool

from .agents import HOST, Stage, until

TRAIN = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import Callback, ElasticModel

ours = {name: value for name, value in os.environ.items() if name.startswith("RESILE_")}
descriptors = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
files = [os.readlink(name) for name in descriptors if os.path.exists(name)]
print("pid", os.getpid(), flush=True)
print("variables", sorted(ours), os.environ["COLOR"], sys.argv[1:])
own = ("/dev/", "/memfd:resile-worker:")
print("files", [name for name in files if name.startswith("/") and not name.startswith(own)])
with open(os.path.join(ours["RESILE_OUTPUT_DIR"], "notes.txt"), "w") as file:
    file.write("noted")

class Pace(Callback):
    def on_iteration(self, loop, iteration):
        if not os.path.exists(os.environ["HURRY"]):
            time.sleep(0.08)

inputs = torch.randn(480, 4, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
model = nn.Linear(4, 1)
ElasticModel(
    model,
    lambda: (TensorDataset(inputs, inputs.sum(1, keepdim=True)), None),
    nn.MSELoss(),
    torch.optim.SGD(model.parameters(), lr=0.01),
    callbacks=[Pace()],
).train(epochs=100, batch_size=48, num_shards=4)
print("through")
"""


@pytest_asyncio.fixture
async def stage(pool: Pool, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = await Stage.open(pool, tmp_path)
    try:
        yield stage
    finally:
        await stage.close()


async def test_a_job_is_founded_grown_shrunk_and_completed_as_its_allocations_say(stage: Stage) -> None:
    agent = await stage.start_agent()
    await stage.submit("job-1", TRAIN, args=("--deep",), env=stage.variables())
    await stage.allocate("job-1", 1, (0, 1), cold_start=True)
    await until(lambda: stage.said("job-1", "switched"))
    await stage.allocate("job-1", 2, (0, 1, 2))
    await until(lambda: stage.said("job-1", "switched")[-1].generation == 2)
    await stage.allocate("job-1", 3, (0,))
    await until(lambda: [stage.worker("job-1", number).state for number in (1, 2)] == ["gone", "gone"])
    assert [stage.exit("job-1", number).kind for number in (1, 2)] == ["left", "left"]
    stage.hurry.touch()
    await until(lambda: stage.worker("job-1", 0).state == "gone")
    assert stage.exit("job-1", 0).kind == "finished"
    await until(lambda: stage.said("job-1", "completed"))
    facts = [report.content.kind for report in stage.reports if report.content.kind != "progress"]
    assert [kind for kind in facts if kind not in ("ready", "left")] == ["switched"] * 3 + ["completed"]
    assert stage.reports[-1].content.kind == "completed"
    progress = stage.said("job-1", "progress")[-1].content
    assert getattr(progress, "iteration", None) == 1000

    printed = [line for worker, line in stage.lines if worker == 0]
    assert "variables ['RESILE_OUTPUT_DIR'] blue ['--deep']" in printed
    assert "files []" in printed, "no file of the agent is open in a worker"
    await until(lambda: (0, "through") in stage.lines)
    log = stage.folder / "agent/jobs/job-1/worker-0.log"
    assert log.read_text().splitlines() == [line for worker, line in stage.lines if worker == 0]
    assert (stage.storage / "jobs/job-1/output/notes.txt").read_text() == "noted"

    await stage.allocate("job-1", 4, ())
    await until(lambda: not (stage.folder / "agent/jobs/job-1/output").exists())
    assert log.exists()
    assert await stage.end_agent(agent, signal.SIGTERM) == 0
    await until(lambda: stage.goodbyes == [1])


async def test_what_workers_do_about_an_allocation_is_reported_in_its_trace(stage: Stage) -> None:
    set_up_tracing("test")
    traces: defaultdict[int, set[str]] = defaultdict(set)

    async def note(received: Received[Report]) -> None:
        traces[trace.get_current_span().get_span_context().trace_id].add(received.message.content.kind)

    following = asyncio.create_task((await stage.pool.bus("monitor")).follow(REPORTS, Report, note))
    await stage.start_agent()
    await stage.submit("job-1", TRAIN, env=stage.variables())
    with traced("found") as founding:
        await stage.allocate("job-1", 1, (0, 1), cold_start=True)
    await until(lambda: stage.said("job-1", "progress"))
    with traced("shrink") as shrinking:
        await stage.allocate("job-1", 2, (0,))
    first, second = (span.get_span_context().trace_id for span in (founding, shrinking))
    await until(lambda: {"ready", "switched"} <= traces[first] and {"switched", "left"} <= traces[second])
    following.cancel()
    assert "left" not in traces[first]
    assert "ready" not in traces[second]


async def test_workers_die_with_their_agent_and_the_next_one_has_a_higher_incarnation(stage: Stage) -> None:
    agent = await stage.start_agent()
    await stage.submit("job-1", TRAIN, env=stage.variables())
    await stage.allocate("job-1", 1, (0, 1), cold_start=True)
    await until(lambda: len(stage.pids()) == 2)
    await stage.end_agent(agent, signal.SIGKILL)
    await until(lambda: not any(map(psutil.pid_exists, stage.pids())))
    await stage.start_agent()
    await until(lambda: len(stage.hellos) == 2)
    assert [hello.incarnation for hello in stage.hellos] == [1, 2]
    await until(lambda: stage.beats[-1].incarnation == 2)
    assert stage.beats[-1].workers == ()


async def test_a_worker_that_misses_a_member_reports_it_until_the_scheduler_decides(stage: Stage) -> None:
    await stage.start_agent()
    await stage.submit("job-1", TRAIN, env=stage.variables())
    await stage.allocate("job-1", 1, (0, 1), cold_start=True)
    await until(lambda: stage.said("job-1", "progress"))
    os.kill(stage.pids()[0], signal.SIGKILL)
    await until(lambda: len(stage.said("job-1", "peer_suspected")) >= 3)
    (accuser,) = {report.worker for report in stage.said("job-1", "peer_suspected")}
    await stage.allocate("job-1", 2, (accuser,), is_recovery=True)
    await until(lambda: stage.said("job-1", "switched")[-1].generation == 2)
    number = len(stage.said("job-1", "peer_suspected"))
    stage.hurry.touch()
    await until(lambda: stage.said("job-1", "completed"))
    assert len(stage.said("job-1", "peer_suspected")) <= number + 1


async def test_training_outlives_an_outage_of_the_bus_and_no_fact_is_lost(stage: Stage) -> None:
    await stage.start_agent()
    await stage.submit("job-1", TRAIN, env=stage.variables())
    await stage.allocate("job-1", 1, (0, 1), cold_start=True)
    await until(lambda: stage.said("job-1", "progress"))
    await stage.pool.kill()
    stage.hurry.touch()
    await until(lambda: not any(map(psutil.pid_exists, stage.pids())))
    await stage.pool.server.start()
    await until(lambda: stage.said("job-1", "completed"))
    await until(lambda: [stage.worker("job-1", number).state for number in (0, 1)] == ["gone", "gone"])
    assert [stage.exit("job-1", number).kind for number in (0, 1)] == ["finished", "finished"]


async def test_an_agent_that_is_killed_during_an_outage_loses_no_fact(stage: Stage) -> None:
    agent = await stage.start_agent()
    await stage.submit("job-1", TRAIN, env=stage.variables())
    await stage.allocate("job-1", 1, (0, 1), cold_start=True)
    await until(lambda: stage.said("job-1", "progress"))
    await stage.pool.kill()
    stage.hurry.touch()
    await until(lambda: not any(map(psutil.pid_exists, stage.pids())))
    await stage.end_agent(agent, signal.SIGKILL)
    assert not stage.said("job-1", "completed")
    await stage.pool.server.start()
    await stage.start_agent()
    await until(lambda: stage.said("job-1", "completed") and len(stage.hellos) == 2)
    assert len(stage.said("job-1", "completed")) == 1


async def test_what_cannot_be_started_is_gone_and_says_why_in_one_line(stage: Stage) -> None:
    await stage.start_agent()
    missing = f"packages/{'0' * 64}.tar.gz"
    broken = stage.store_package({"train.py": ""})
    (stage.storage / broken).write_bytes(b"something else")
    packages = {"missing": missing, "broken": broken, "empty": stage.store_package({"other.py": ""})}
    for job, package in packages.items():
        await stage.submit(job, package=package)
    for job in (*packages, "unknown"):
        await stage.place(job, 1, (0,))
        await until(lambda job=job: stage.worker(job, 0).state == "gone")
    why = {job: stage.exit(job, 0) for job in (*packages, "unknown")}
    assert {exit_.kind for exit_ in why.values()} == {"not started"}
    assert "is not in the storage" in why["missing"].message
    assert "its content does not match the checksum in its name" in why["broken"].message
    assert why["empty"].message == "the job's package has no script train.py"
    assert why["unknown"].message == "no record of job unknown is stored"


async def test_workers_of_two_jobs_with_the_same_number_are_told_apart(stage: Stage) -> None:
    await stage.start_agent()
    for slot, job in enumerate(("job-1", "job-2")):
        await stage.submit(job, "import time; print('here'); time.sleep(600)")
        await stage.place(job, 1, (0,), slot=slot)
    await until(lambda: all(stage.worker(job, 0).address for job in ("job-1", "job-2")))
    await stage.place("job-1", 2, ())
    await until(lambda: stage.worker("job-1", 0).state == "gone")
    await until(lambda: all(worker.job != "job-1" or worker.state == "gone" for worker in stage.beats[-1].workers))
    assert stage.worker("job-2", 0).state == "starting"
    stop = StopWorkers(epoch=1, job="job-2", incarnation=1, workers=(0,))
    await stage.bus.send(subjects.instruction(HOST), Instruction(stop))
    await until(lambda: stage.worker("job-2", 0).state == "gone")
    assert stage.exit("job-2", 0).kind == "killed"


async def test_an_agent_comes_back_when_its_host_was_given_up_and_when_its_fork_server_was_killed(stage: Stage) -> None:
    agent = await stage.start_agent()
    await stage.submit("job-1", TRAIN, env=stage.variables())
    await stage.allocate("job-1", 1, (0,), cold_start=True)
    await until(lambda: stage.pids())
    await stage.store_host(HostState.LOST)
    await until(lambda: not any(map(psutil.pid_exists, stage.pids())))
    await until(lambda: stage.beats[-1].incarnation == 2)
    assert stage.beats[-1].workers == ()
    (fork_server,) = psutil.Process(agent.pid).children()
    fork_server.kill()
    await until(lambda: stage.beats[-1].incarnation == 3)


async def test_an_agent_of_a_pool_that_was_upgraded_ends_and_does_not_come_back(stage: Stage) -> None:
    agent = await stage.start_agent(stderr=subprocess.PIPE)
    await until(lambda: stage.hellos)
    assert stage.hellos[0].version == VERSION
    await stage.upgrade()
    _, err = await agent.communicate()
    assert agent.returncode == 1
    fault = f"this machine runs Resile {VERSION}, but its pool runs Resile 9.9.9: install the pool's version"
    assert fault in err.decode().splitlines()[-1]
    again = await stage.start_agent(stderr=subprocess.PIPE)
    _, err = await again.communicate()
    assert again.returncode == 1
    assert fault in err.decode().splitlines()[-1]
    assert [hello.incarnation for hello in stage.hellos] == [1]


KILLS_ITS_FORK_SERVER = """
import os, signal, subprocess
daemon = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("pid", daemon.pid, flush=True)
with open(os.environ["HURRY"], "w") as file:
    file.write(str(daemon.pid))
os.kill(os.getppid(), signal.SIGKILL)
"""


async def test_a_script_that_kills_its_fork_server_is_named_in_a_last_heartbeat_and_leaves_nothing(
    stage: Stage,
) -> None:
    await stage.start_agent()
    await stage.submit("job-1", KILLS_ITS_FORK_SERVER, env=stage.variables())
    await stage.place("job-1", 1, (0,), cold_start=True)
    await until(lambda: stage.beats and stage.beats[-1].incarnation == 2)
    last = [beat for beat in stage.beats if beat.incarnation == 1][-1]
    assert [(worker.job, worker.exit and worker.exit.kind) for worker in last.workers] == [("job-1", "orphaned")]
    assert not psutil.pid_exists(int(stage.hurry.read_text()))


async def test_an_agent_that_does_not_share_the_pools_storage_is_refused(stage: Stage) -> None:
    elsewhere = (stage.folder / "elsewhere").as_uri()
    agent = await stage.start_agent("--storage", elsewhere, stderr=subprocess.PIPE)
    _, err = await agent.communicate()
    assert agent.returncode == UsageError.exit_status
    last = err.decode().splitlines()[-1]
    assert last.endswith(f"--storage: {elsewhere} is not this pool's storage: give the URL that the pool uses")
