"""Traces that are read for a simulation: what they become, and what is said of those that are malformed."""

import json
from pathlib import Path
from typing import Any

import pytest

from resile_scheduler.simulation.csv_table import MalformedFile
from resile_scheduler.simulation.simulate import Settings, simulate
from resile_scheduler.simulation.sources import read_trace
from resile_scheduler.simulation.training import Modelled, Profiled, Recorded, Sharded
from resile_shared.errors import UsageError
from resile_shared.messages.commands import JobPause, JobPriority, JobResume, JobStop, TenantDelete, TenantSet
from resile_shared.messages.hosts import HostState
from resile_shared.messages.message import MAX_INTEGER
from resile_shared.policies import PolicyName

from . import traces

SHARDED = "name,time,iterations,shard_seconds,max_workers,priority,deadline,tenant\n"


def csv(folder: Path, text: str) -> str:
    path = folder / "jobs.csv"
    path.write_text(text)
    return str(path)


def test_a_workload_of_shards(tmp_path: Path) -> None:
    path = csv(tmp_path, SHARDED + "late,20,100,0.5,4,9000,90,red\nearly,10,200,0.25,,,,\n")
    workload = read_trace(path, num_slots=8)
    early, late = workload.submissions
    assert (early.time, early.job, early.spec.name, early.deadline) == (10, "job-2", "early", None)
    assert early.training == Sharded(200, 24, 0.25)
    assert early.spec.max_workers == 24
    assert (late.spec.max_workers, late.spec.priority, late.spec.tenant, late.deadline) == (4, 9000, "red", 90)
    assert [(host.host, host.num_slots) for host in workload.hosts] == [("host-1", 8)]


def test_a_workload_of_models_with_measured_throughputs(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "toy.csv").write_text("global_batch_size,1,2,4\n64,10,18,30\n128,5,9.5,17\n")
    path = csv(
        tmp_path,
        "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"
        "a,1000,50,toy,1100,64,1,5\nb,1060,50,toy,,128,1,5\n",
    )
    first, second = read_trace(path, profiles=profiles).submissions
    assert (first.time, second.time) == (0, 60)
    assert (first.deadline, second.deadline) == (100, None)
    assert isinstance(first.training, Modelled)
    assert first.training.pace((1,), 64, 0.0).seconds == pytest.approx(0.1, rel=0.1)
    assert first.training.iterations_total == 50
    assert first.training.batch_range is not None
    assert (first.training.batch_range.least, first.training.batch_range.most) == (64, 512)


@pytest.mark.parametrize(("column", "times"), [("submission_time", "1e12,"), ("deadline", "1700000000,1e12")])
def test_times_by_a_clock_count_from_the_first_submission(column: str, times: str, tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "toy.csv").write_text("global_batch_size,1,2\n64,10,18\n")
    header = "job_id,num_iteration,model_name,batch_size,submission_time,deadline\n"
    path = csv(tmp_path, header + f"a,50,toy,64,1700000000,1700000100\nb,50,toy,64,{times}\n")
    with pytest.raises(MalformedFile, match=rf"line 3, column {column}: '1e12' is not a number of seconds, of ten"):
        read_trace(path, profiles=profiles)


def toy_profiles(folder: Path) -> Path:
    """Write the profile of an application ``toy``; return the folder of profiles."""
    profile = folder / "profiles" / "toy"
    profile.mkdir(parents=True)
    (profile / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1,8,1,0\n1,16,2,0\n")
    (profile / "scalability.csv").write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n2,8,8,1.5,0.5\n")
    for batch in (8, 32):
        rows = "100,0,1\n200,0,1\n"
        (profile / f"validation-{batch}.csv").write_text(f"progress,grad_sqr,grad_var\n{rows}")
    return profile.parent


def test_a_workload_of_profiled_applications(tmp_path: Path) -> None:
    profiles = toy_profiles(tmp_path)
    path = csv(tmp_path, "name,time,application,num_replicas,batch_size\na,5,toy,1,8\n")
    (job,) = read_trace(path, profiles=profiles).submissions
    assert isinstance(job.training, Profiled)
    assert (job.training.work, job.training.num_shards) == (200, 4)
    pace = job.training.pace((1,), 8, 0.0)
    assert (pace.seconds, pace.work, pace.until) == (1.0, 1.0, 100.0)
    assert job.training.pace((1,), 8, 100.0).until == 200.0
    assert job.training.pace((1,), 16, 0.0).work == pytest.approx(2.0), "all noise: twice the batch is worth twice"
    few = job.training.pace((4, 4), 8, 0.0)
    assert (few.seconds, few.exchange_seconds) == (1.5, 0.5), "8 samples of a worker are the fewest that were measured"


def test_a_history_becomes_jobs_requests_and_hosts(tmp_path: Path) -> None:
    workload = read_trace(str(traces.write(tmp_path, traces.story())))
    one, two = workload.submissions
    assert (one.time, two.time) == (1, 17)
    assert one.training == Recorded(300, 24, {3: 0.4, 4: 0.3, 8: 0.15})
    assert (one.spec.max_workers, one.spec.priority, two.spec.priority) == (8, 5000, 5000)
    assert [(request.time, request.request) for request in workload.requests] == [
        (47, JobPriority(job_id="job-2", priority=10_000))
    ]
    assert [(host.host, host.num_slots) for host in workload.hosts] == [("host-1", 4), ("host-2", 4)]
    assert workload.start_seconds == 1.0
    on_others = read_trace(str(tmp_path / "history.json"), num_slots=6, num_hosts=2)
    assert [host.num_slots for host in on_others.hosts] == [3, 3]


def test_what_users_wanted_and_hosts_that_were_there_before_are_taken_from_a_history(tmp_path: Path) -> None:
    events = [
        traces.job_event(0, "job-1", "accepted"),
        traces.job_event(2, "job-1", "allocation", workers=6),
        traces.job_event(10, "job-1", "pausing", iteration=80, workers=6),
        traces.job_event(12, "job-1", "paused", iteration=100),
        traces.host_event(15, "host-2", "lost"),
        traces.host_event(16, "host-2", "joined", slots=4),
        traces.job_event(22, "job-1", "allocation", iteration=100, workers=6),
        traces.job_event(32, "job-1", "stopped", iteration=180),
        traces.job_event(33, "job-2", "accepted"),
    ]
    workload = read_trace(str(traces.write(tmp_path, events)))
    assert [(request.time, type(request.request)) for request in workload.requests] == [
        (10, JobPause),
        (20, JobResume),
        (32, JobStop),
    ]
    assert [(host.time, host.host, host.state, host.num_slots) for host in workload.hosts] == [
        (0, "host-1", HostState.UP, 4),
        (15, "host-2", HostState.LOST, 0),
        (16, "host-2", HostState.UP, 4),
    ]
    assert workload.left_out == ("job-2",)


def test_a_history_may_have_an_event_in_each_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in traces.story()))
    assert len(read_trace(str(path)).submissions) == 2


def test_sizes_that_were_not_recorded_follow_from_those_that_were() -> None:
    one = Recorded(100, 24, {4: 0.6})
    assert one.pace((8,), 0, 0.0).seconds == pytest.approx(0.3)
    two = Recorded(100, 24, {4: 0.7, 8: 0.4})
    assert two.pace((12,), 0, 0.0).seconds == pytest.approx(0.3), "0.1 s, and 0.1 s a shard"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("name,when\n", "line 1: the header needs the columns name, time, iterations, shard_seconds; or "),
        (SHARDED, "line 2: no rows below the header"),
        (SHARDED + "a,0,10,0.1,4,,,\nb,x,10,0.1,4,,,\n", "line 3, column time: 'x' is not a number of seconds"),
        (SHARDED + "a,1e300,10,0.1,4,,,\n", "line 2, column time: '1e300' is not a number of seconds, of ten years at"),
        (
            SHARDED + "a,0,10000000000000,0.1,4,,,\n",
            "line 2, column iterations: '10000000000000' is not a whole number",
        ),
        (
            "name,time,iterations,shard_seconds,deadline\na,0,10,0.1,1e300\n",
            "line 2, column deadline: '1e300' is not a number of seconds, of ten years at",
        ),
        (SHARDED + "a,0,10,1e-300,4,,,\n", "line 2, column shard_seconds: '1e-300' is not a number of seconds from"),
        (SHARDED + "a,0,0,0.1,4,,,\n", "line 2, column iterations: '0' is not a whole number of iterations"),
        (SHARDED + "a,0,10,0.1,4,2000000,,\n", "line 2, column priority: 2000000 is above 1000000"),
        (SHARDED + "a,0,10,0.1,4,,,red team\n", "line 2, column tenant: must match pattern"),
        (SHARDED + "a,0,10,0.1,0.5,,,\n", "line 2, column max_workers: '0.5' is not a whole number of workers"),
        (SHARDED + "a,0,10\n", "line 2: 3 cells, and the header has 8"),
        (
            "name,time,iterations,shard_seconds,min_workers\na,0,10,0.1,9\n",
            "line 2, column min_workers: a minimum of 9 workers, and the pool has 8 slots",
        ),
        (
            SHARDED + "a,0,1000000000000,86400,,,,\n",
            "line 2, column iterations: on 8 workers it takes 3e+12 days: at",
        ),
        (
            "name,time,iterations,shard_seconds,num_shards\na,0,10,0.1,10001\n",
            "line 2, column num_shards: '10001' is not a whole number of shards up to 10000",
        ),
        (
            "name,time,application,num_replicas,batch_size\na,0,toy,1,8\n",
            "line 1, column application: its jobs need a folder of profiles: --profiles DIR",
        ),
    ],
)
def test_a_malformed_workload_is_named_by_line_and_column(tmp_path: Path, text: str, fault: str) -> None:
    path = csv(tmp_path, text)
    with pytest.raises(MalformedFile) as raised:
        read_trace(path, num_slots=8)
    assert str(raised.value).startswith(f"{path}, {fault}")


def test_a_workload_as_excel_writes_it(tmp_path: Path) -> None:
    (tmp_path / "jobs.csv").write_text("\ufeff" + SHARDED + "a,0,10,0.1,,,,\n", encoding="utf-8")
    assert read_trace(str(tmp_path / "jobs.csv")).submissions[0].spec.name == "a"


def test_numbers_within_their_limits_can_be_simulated(tmp_path: Path) -> None:
    header = "name,time,iterations,shard_seconds,num_shards,max_workers\n"
    path = csv(tmp_path, header + "a,0,1000000000000,0.000001,10000,10000\n")
    (claimed,) = read_trace(path, num_slots=10_000).submissions
    assert claimed.ready().samples == MAX_INTEGER


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "line 1: it is empty: the header has the batch, and numbers of workers"),
        ("batch,1,two\n32,1,1\n", "line 1, column two: this column is no whole number of workers"),
        ("batch,1,10001\n32,1,1\n", "line 1, column 10001: a job has 10000 workers at most"),
        ("batch,1,2,02\n32,1,1,1\n", "line 1, column 02: the header has this number of workers more than once"),
        ("batch,1,2,2\n32,1,1,2\n", "line 1, column 2: the header has this number of workers more than once"),
        ("batch,1,2\n32,,1\n", "line 1, column 1: no batch was measured with one worker"),
        ("batch,1\n32,1e-320\n", "line 2, column 1: '1e-320' is not a number of iterations per second, from one a"),
        ("batch,1\n32,1e300\n", "line 2, column 1: '1e300' is not a number of iterations per second, from one a"),
    ],
)
def test_a_malformed_model_is_named_by_line_and_column(tmp_path: Path, text: str, fault: str) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "m.csv").write_text(text)
    path = csv(tmp_path, "job_id,submission_time,num_iteration,model_name,batch_size\na,0,10,m,32\n")
    with pytest.raises(MalformedFile) as raised:
        read_trace(path, profiles=profiles)
    assert str(raised.value).startswith(f"{profiles / 'm.csv'}, {fault}")


def test_a_job_of_a_model_that_never_ends_is_refused(tmp_path: Path) -> None:
    profiles = tmp_path / "profiles"
    profiles.mkdir()
    (profiles / "m.csv").write_text("batch,1\n32,1\n")
    header = "job_id,submission_time,num_iteration,model_name,batch_size\n"
    path = csv(tmp_path, header + "a,0,1000000000000,m,1000000000000\n")
    with pytest.raises(MalformedFile, match=r"line 2, column num_iteration: on 40 workers it takes .* days"):
        read_trace(path, profiles=profiles)


def test_names_of_profiled_jobs_are_checked(tmp_path: Path) -> None:
    path = csv(tmp_path, "name,time,application,num_replicas,batch_size\n,0,toy,1,8\n")
    with pytest.raises(MalformedFile, match="line 2, column name: must have at least 1 character"):
        read_trace(path, profiles=toy_profiles(tmp_path))


def without_a_time(event: dict[str, Any]) -> dict[str, Any]:
    item = {key: value for key, value in event["data"]["item"].items() if key != "time"}
    return event | {"data": event["data"] | {"item": item}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "line 1: it is empty: `resile events --tail 10000 --json` prints a history"),
        ('{"events": [\n{"stream" 5}]}', "line 2, column 11: not JSON: "),
        ('{"stream": "events"}\n{"stream"\n', "line 2, column 10: not JSON: "),
        (json.dumps({"events": [{"stream": 5}]}), "line 1, column events[0].stream: must be"),
        (
            "".join(json.dumps(event) + "\n" for event in (traces.story()[2], without_a_time(traces.story()[3]))),
            "line 2, column data.item.time: is missing",
        ),
        (
            json.dumps({"events": [traces.story()[2] | {"subject": "resile.nothing.known"}]}),
            "line 1, column events[0].subject: ",
        ),
        (json.dumps({"events": [traces.story()[2]]}), "line 1: no job in it has trained"),
    ],
)
def test_a_malformed_history_is_named_by_line_and_place(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(MalformedFile) as raised:
        read_trace(str(path))
    assert str(raised.value).startswith(f"{path}, {fault}")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"min_workers": 9}, "data: "),
        ({"name": ""}, "data.name: "),
        ({"group": "foo"}, "data: group: "),
        ({"sizes": [3, 2]}, "data: sizes must be in increasing order"),
        ({"num_shards": 2**53 - 1}, "data.batch_size: "),
        ({"iterations_total": 2**53 - 1}, ""),
        (
            {"item": {"slots": ["host-9/1024"]}},
            "data.item.slots: there is no slot host-9/1024: a host has 1024",
        ),
        ({"item": {"time": "2999-01-01T00:00:00Z"}}, "data.item.time: more than ten years after the first event"),
        (
            {"iterations_total": 2**53 - 1, "item": {"kind": "allocation"}},
            "data.iterations_total: on 8 workers it takes",
        ),
    ],
)
def test_what_a_history_says_of_a_job_is_checked(tmp_path: Path, changes: dict[str, Any], fault: str) -> None:
    events = traces.story()
    item = events[-1]["data"]["item"] | changes.get("item", {})
    events[-1]["data"] |= changes | {"item": item}
    path = traces.write(tmp_path, events)
    if not fault:
        simulate(read_trace(str(path)), Settings(PolicyName.FAIRSHARE))
        return
    with pytest.raises(MalformedFile) as raised:
        read_trace(str(path))
    assert str(raised.value).startswith(f"{path}, line 1, column events[12].{fault}")


def test_an_allocation_without_workers_takes_no_time(tmp_path: Path) -> None:
    events = [
        traces.host_event(0, "host-1", "joined", slots=4),
        traces.job_event(1, "job-1", "accepted", max_workers=4, num_shards=24),
        traces.job_event(2, "job-1", "allocation", workers=0, max_workers=4, num_shards=24),
        traces.job_event(5, "job-1", "allocation", iteration=10, workers=4, max_workers=4, num_shards=24),
        traces.job_event(15, "job-1", "completed", iteration=20, max_workers=4, num_shards=24),
    ]
    (submission,) = read_trace(str(traces.write(tmp_path, events))).submissions
    assert isinstance(submission.training, Recorded)
    assert submission.training.seconds == {4: 1.0}


@pytest.mark.parametrize(
    ("trace", "slots", "hosts", "fault"),
    [
        ("nothing.json", None, None, "no trace nothing.json: name a history (JSON), a workload (.csv), or low, "),
        ("low", 3, 4, "3 slots on 4 hosts: every host needs at least one slot"),
        ("low", 200_000, None, "a pool of 200000 slots: at most 100000 can be simulated"),
    ],
)
def test_what_cannot_be_is_refused(trace: str, slots: int | None, hosts: int | None, fault: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_trace(trace, num_slots=slots, num_hosts=hosts)
    assert str(raised.value).startswith(fault)


def test_sizes_of_a_workload_and_tenants_of_a_history(tmp_path: Path) -> None:
    path = csv(tmp_path, "name,time,iterations,shard_seconds,sizes\na,0,10,0.1,1 2 4\nb,0,10,0.1,\n")
    assert [job.spec.sizes for job in read_trace(path).submissions] == [(1, 2, 4), ()]
    share = {"number": 1, "time": traces.stamp(3), "tenant": "red", "share": {"weight": 3, "quota": 2}}
    gone = {"number": 2, "time": traces.stamp(5), "tenant": "red", "share": None}
    changes = [traces.event(3, "resile.pool.tenant", share), traces.event(5, "resile.pool.tenant", gone)]
    workload = read_trace(str(traces.write(tmp_path, [*traces.story(), *changes])))
    assert [(request.time, request.request) for request in workload.requests] == [
        (3, TenantSet(tenant_id="red", weight=3, quota=2, cap=0)),
        (5, TenantDelete(tenant_id="red")),
        (47, JobPriority(job_id="job-2", priority=10_000)),
    ]
    simulate(workload, Settings(PolicyName.FAIRSHARE))
