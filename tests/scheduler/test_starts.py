"""Cold starts: they end in a generation that trains, or are given up in time, and are not repeated without a pause."""

from resile_scheduler.core.events import JobChangeRequested, Tick
from resile_scheduler.core.losses.deadlines import JOIN_SECONDS
from resile_scheduler.core.losses.worker_ends import MAX_STARTS, MAX_UNLINKED_STARTS
from resile_shared.messages.commands import JobPause, JobResume
from resile_shared.messages.jobs import JobState
from resile_shared.messages.reports import CheckpointSaved, Evidence, PeerSuspected

from .test_core import Bench, gone, ready, worker

LINK_SECONDS = 30.0


def ends(bench: Bench, *, kind: str = "exited") -> None:
    """The workers of the newest start are gone."""
    last = [allocation for allocation in bench.allocations if allocation.placements][-1]
    for host in {placement.host for placement in last.placements}:
        here = [placement for placement in last.placements if placement.host == host]
        bench.beat(*(gone(p.worker, p.slot, kind=kind) for p in here), host=host)


def becomes_ready(bench: Bench, **addresses: str) -> None:
    """All workers of the newest allocation reach their training call; ``addresses`` are those of hosts."""
    for host in {placement.host for placement in bench.newest().placements}:
        here = [placement for placement in bench.newest().placements if placement.host == host]
        address = addresses.get(host.replace("-", "_"), "h")
        bench.beat(*(worker(p.worker, p.slot, at=address) for p in here), host=host)
    for placement in bench.newest().placements:
        bench.report(ready(), worker=placement.worker)
    bench.tell(Tick())


def passes(bench: Bench, seconds: float) -> None:
    bench.now += seconds
    bench.tell(Tick())


def reason(bench: Bench) -> str:
    return bench.histories["job-1"][-1].reason


def test_a_start_whose_members_do_not_reach_each_other_is_given_up_and_avoids_a_host() -> None:
    bench = Bench(1, 1)
    bench.submit()
    becomes_ready(bench)
    passes(bench, LINK_SECONDS - 0.1)
    assert bench.records["job-1"].state is JobState.STARTING
    passes(bench, 0.1)
    assert bench.records["job-1"].state is JobState.QUEUED
    assert reason(bench) == (
        "its start was cancelled: worker 0 on host-1/0 is ready, but the workers had no links to each other after 30 "
        "seconds"
    )
    ends(bench)
    assert [placement.host for placement in bench.newest().placements] == ["host-2"]
    assert bench.newest().cold_start


def test_a_start_whose_members_do_not_reach_each_other_names_their_addresses() -> None:
    bench = Bench(1, 1)
    bench.submit()
    becomes_ready(bench, host_1="10.0.0.1", host_2="172.17.0.2")
    passes(bench, LINK_SECONDS)
    assert reason(bench).endswith(
        "after 30 seconds: it is at 10.0.0.1, others at 172.17.0.2; hosts must reach each other on any port (`resile "
        "host --address`)"
    )


def test_a_job_whose_members_never_reach_each_other_fails_with_the_reason() -> None:
    bench = Bench(1, 1)
    bench.submit(min_workers=2)
    for _ in range(MAX_UNLINKED_STARTS):
        assert bench.records["job-1"].state is JobState.STARTING
        becomes_ready(bench)
        passes(bench, LINK_SECONDS)
        ends(bench)
        for _ in range(2):  # the host is used again, then the pause is over
            passes(bench, 400.0)
    assert bench.records["job-1"].state is JobState.FAILED
    assert "had no links to each other" in reason(bench)


def accuses_for(bench: Bench, seconds: int, evidence: Evidence) -> None:
    """The first worker of the newest start accuses the second again and again."""
    first, second = (placement.worker for placement in bench.newest().placements)
    for _ in range(seconds + 1):
        accusation = PeerSuspected(suspect=second, evidence=evidence, reason="the connection broke")
        bench.report(accusation, worker=first, generation=bench.newest().generation)
        passes(bench, 1.0)


def start_again(bench: Bench) -> None:
    """A job that has trained starts again: its workers may take long to load a checkpoint."""
    bench.submit(min_workers=2)
    becomes_ready(bench)
    bench.switch()
    ends(bench, kind="killed")
    for _ in range(10):
        passes(bench, 1.0)
    assert bench.records["job-1"].state is JobState.STARTING
    assert bench.newest().resume
    becomes_ready(bench)


def test_a_start_in_which_links_break_is_not_waited_for_as_long_as_a_checkpoint_may_take() -> None:
    bench = Bench(1, 1)
    start_again(bench)
    accuses_for(bench, int(LINK_SECONDS) - 1, "broken link")
    assert bench.records["job-1"].state is JobState.STARTING
    accuses_for(bench, 1, "broken link")
    assert bench.records["job-1"].state is JobState.QUEUED
    assert reason(bench) == (
        f"its start was cancelled: worker {bench.allocations[-2].placements[1].worker} on host-2/0 is cut off: the "
        "workers lost their links to each other 30 seconds ago"
    )


def test_the_host_that_most_members_cannot_reach_is_avoided() -> None:
    bench = Bench(1, 1, 1, 1)
    bench.submit(max_workers=3)
    becomes_ready(bench)
    members = [placement.worker for placement in bench.newest().placements]
    for _ in range(int(LINK_SECONDS) + 1):
        for accuser, suspect in ((members[0], members[1]), (members[2], members[1]), (members[1], members[2])):
            accusation = PeerSuspected(suspect=suspect, evidence="broken link", reason="the connection broke")
            bench.report(accusation, worker=accuser, generation=bench.newest().generation)
        passes(bench, 1.0)
    assert "worker 1 on host-2/0" in reason(bench)
    ends(bench)
    assert [placement.host for placement in bench.newest().placements] == ["host-1", "host-3", "host-4"]


def test_a_worker_that_was_silent_for_a_moment_may_still_load_its_checkpoint() -> None:
    bench = Bench(1, 1)
    start_again(bench)
    accuses_for(bench, 2 * int(LINK_SECONDS), "silence")
    assert bench.records["job-1"].state is JobState.STARTING


def test_starts_that_were_unlinked_are_forgotten_once_the_job_trains() -> None:
    bench = Bench(1, 1)
    bench.submit()
    becomes_ready(bench)
    passes(bench, LINK_SECONDS)
    ends(bench)
    assert bench.records["job-1"].failures.unlinked_starts == 1
    becomes_ready(bench)
    bench.switch()
    assert bench.records["job-1"].failures.unlinked_starts == 0


def test_a_member_that_never_reaches_its_training_call_is_not_waited_for_for_ever() -> None:
    bench = Bench(2)
    bench.submit()
    for _ in range(MAX_STARTS):
        bench.listen()
        bench.report(ready(), worker=bench.newest().placements[0].worker)
        passes(bench, JOIN_SECONDS - 1.0)
        assert bench.records["job-1"].state is JobState.STARTING, "an import may take minutes"
        passes(bench, 1.0)
        ends(bench)
        while bench.records["job-1"].state is JobState.QUEUED:
            passes(bench, 0.5)
    assert bench.records["job-1"].state is JobState.FAILED
    assert reason(bench) == "worker 5 on host-1/1 is not ready after 600 seconds"


def test_members_that_load_a_checkpoint_have_more_time_by_its_size() -> None:
    bench = Bench(1)
    bench.submit()
    bench.activate()
    bench.report(CheckpointSaved(lineage=1, iteration=30, num_bytes=1_000_000_000), generation=1)
    ends(bench, kind="killed")
    becomes_ready(bench)
    passes(bench, LINK_SECONDS + JOIN_SECONDS + 99.0)
    assert bench.records["job-1"].state is JobState.STARTING
    passes(bench, 1.0)
    assert bench.records["job-1"].state is JobState.QUEUED


def test_members_have_time_to_load_a_checkpoint_though_no_switch_was_reported() -> None:
    bench = Bench(1)
    bench.submit()
    becomes_ready(bench)
    bench.report(CheckpointSaved(lineage=1, iteration=30, num_bytes=1), generation=1)
    ends(bench, kind="killed")
    becomes_ready(bench)
    passes(bench, LINK_SECONDS)
    assert bench.records["job-1"].state is JobState.STARTING


def test_starts_without_progress_are_repeated_with_growing_pauses() -> None:
    bench = Bench(1)
    bench.submit()
    pauses = []
    for _ in range(5):
        bench.activate()
        bench.beat(worker(bench.newest().placements[0].worker, 0, state="member"))
        ends(bench, kind="abandoned")
        began = bench.now
        while not bench.newest().placements:
            passes(bench, 0.5)
        pauses.append(bench.now - began)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0]


def test_progress_ends_the_pauses_and_so_does_a_user() -> None:
    bench = Bench(1)
    bench.submit()
    for _ in range(2):
        bench.activate()
        ends(bench, kind="abandoned")
    assert bench.newest().placements == ()
    bench.tell(JobChangeRequested("pause", JobPause(job_id="job-1")))
    bench.tell(JobChangeRequested("resume", JobResume(job_id="job-1")))
    assert bench.newest().placements
    for _ in range(3):
        bench.activate()
        number = bench.newest().placements[0].worker
        member = worker(number, 0, state="member").model_copy(update={"generation": bench.newest().generation})
        bench.beat(member.model_copy(update={"iteration": 1}))
        ends(bench, kind="abandoned")
        assert bench.newest().placements, "it came further, so it starts again at once"


def test_a_start_that_a_crash_of_the_scheduler_undoes_costs_the_job_no_turn() -> None:
    bench = Bench(1)
    bench.submit()
    bench.submit(2)
    bench.now += 10.0
    bench.allocations.clear()  # the crash came after the record of the start, and before its allocation
    bench.restart()
    bench.beat(host="host-1")
    assert [allocation.job for allocation in bench.allocations if allocation.placements] == ["job-1"]


def test_a_job_whose_shards_are_too_few_for_the_sizes_that_its_minimum_allows_has_a_worker_for_each() -> None:
    bench = Bench(4)
    bench.submit(min_workers=3, sizes=(1, 2, 4))
    bench.activate(num_shards=3)
    assert len(bench.newest().placements) == 3
    bench.switch()
    assert bench.records["job-1"].state is JobState.RUNNING
