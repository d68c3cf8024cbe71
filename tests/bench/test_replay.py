"""Workloads replayed in simulated time, with small made-up profiles."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.published.baselines import Tiresias
from bench.published.fairness import finish_time_fairness
from bench.published.replay import (
    Allocation,
    Cluster,
    Events,
    Nodes,
    Overcommitted,
    ReplayedJob,
    Ticks,
    replay,
)
from resile_scheduler.simulation.arrivals import Arrival, read_arrivals
from resile_scheduler.simulation.csv_table import MalformedFile
from resile_scheduler.simulation.profiles import Application, read_application, smallest_rotation, split_batch


def application(*, num_epochs: int = 2, epoch_progress: float = 100.0) -> Application:
    """A step of one worker takes a second; each further one doubles the speed, and across nodes half of it is exchange.

    The gradient is all noise: a batch twice as large makes twice the progress per iteration.
    """
    placements = {
        (1,): ((8, 1.0, 0.0), (16, 2.0, 0.0)),
        (2,): ((8, 1.0, 0.0), (16, 2.0, 0.0)),
        (1, 1): ((8, 1.0, 0.5), (16, 2.0, 0.5)),
    }
    epochs = tuple((epoch_progress * (epoch + 1), 0.0, 1.0) for epoch in range(num_epochs))
    return Application(
        name="toy",
        placements=placements,
        by_size={(len(p), sum(p)): curve for p, curve in placements.items()},
        epochs={8: epochs, 32: epochs},
        smallest_local=8,
        largest_local=16,
    )


TOY = application()


def arrival(job: str, *, time: float = 0.0, workers: int = 1, batch_size: int = 8, app: Application = TOY) -> Arrival:
    return Arrival(job, time, app, workers, batch_size)


class Scripted:
    """Gives each job what a script says for the number of the decision; the last entry stays."""

    def __init__(self, *nodes: dict[str, Nodes]) -> None:
        self._nodes = nodes
        self._num_decisions = 0

    def decide(self, jobs: Sequence[ReplayedJob], cluster: Cluster, *, now: float) -> dict[str, Allocation]:
        nodes = self._nodes[min(self._num_decisions, len(self._nodes) - 1)]
        self._num_decisions += 1
        return {job.name: Allocation(nodes[job.name], job.arrival.batch_size) for job in jobs if job.name in nodes}


def test_with_ticks_a_job_waits_for_the_tick_and_loses_time_at_its_start() -> None:
    (done,) = replay([arrival("a", time=10)], Scripted({"a": (0,)}), Cluster(1, 1), Ticks(60, change_seconds=30))
    assert done.completed == 60 + 30 + 200
    assert done.completion_time == 280
    assert done.num_changes == 0
    assert done.slot_seconds == 230


def test_with_events_a_job_starts_when_it_is_submitted() -> None:
    (done,) = replay([arrival("a", time=10)], Scripted({"a": (0,)}), Cluster(1, 1), Events(60, change_seconds=1))
    assert done.completed == 10 + 1 + 200


def test_a_completion_frees_slots_at_the_tick_or_at_once() -> None:
    jobs = [arrival("a"), arrival("b")]
    ticks = replay(jobs, Tiresias(), Cluster(1, 1), Ticks(60, change_seconds=30))
    events = replay(jobs, Tiresias(), Cluster(1, 1), Events(60, change_seconds=0))
    assert [job.completed for job in ticks] == [60 + 230, 300 + 230]
    assert [job.completed for job in events] == [200, 400]


def test_a_change_costs_time_and_the_new_size_decides_the_speed() -> None:
    jobs = [arrival("a", batch_size=16)]
    clock = Events(50, change_seconds=10)
    (done,) = replay(jobs, Scripted({"a": (0,)}, {"a": (0, 0)}), Cluster(1, 2), clock)
    # One worker takes two steps of 8 for twice the progress: 40 of 200 after 50 s, 10 of them lost. Two do it in one.
    assert done.completed == 50 + 10 + (200 - 40) / 2
    assert done.num_changes == 1
    assert done.slot_seconds == 50 + 2 * 90


def test_two_workers_share_what_one_does_in_steps() -> None:
    jobs = [arrival("a", batch_size=32)]
    (within,) = replay(jobs, Scripted({"a": (0,)}), Cluster(1, 1), Events(60, change_seconds=0))
    (across,) = replay(jobs, Scripted({"a": (0, 1)}), Cluster(2, 1), Events(60, change_seconds=0))
    # Four times the progress per iteration: two steps of 16 on one worker, one on each of two.
    assert within.completed == 200 / 4 * 4
    assert across.completed == 200 / 4 * 2


def test_an_allocation_beyond_a_node_is_refused() -> None:
    with pytest.raises(Overcommitted, match="nodes have: 1"):
        replay([arrival("a")], Scripted({"a": (0, 1, 1)}), Cluster(2, 1), Ticks())


class Watched(Tiresias):
    """Notes who holds what after each decision."""

    def __init__(self, **options: float) -> None:
        super().__init__(**options)
        self.held: list[dict[str, Nodes]] = []

    def decide(self, jobs: Sequence[ReplayedJob], cluster: Cluster, *, now: float) -> dict[str, Allocation]:
        allocations = super().decide(jobs, cluster, now=now)
        self.held.append({job: allocation.nodes for job, allocation in allocations.items()})
        return allocations


def test_tiresias_serves_the_first_queue_first_and_each_in_the_order_of_arrival() -> None:
    long = application(epoch_progress=1000.0)
    jobs = [
        arrival("a", app=long),
        arrival("b", time=70, app=long),
        arrival("c", time=80, app=application(num_epochs=1)),
    ]
    scheduler = Watched(demotion_slot_seconds=120.0)
    done = replay(jobs, scheduler, Cluster(1, 1), Ticks(60, change_seconds=0))
    order = [name for name, _ in itertools.groupby(next(iter(held), "") for held in scheduler.held)]
    # b and c pass a once it has attained 120 slot-seconds; b is demoted too, behind a.
    assert order[:4] == ["a", "b", "c", "a"]
    assert done[2].completed < done[0].completed < done[1].completed


def test_tiresias_lets_a_small_gang_pass_one_that_does_not_fit_and_never_splits_a_gang() -> None:
    jobs = [arrival("a", workers=2, batch_size=16), arrival("b", workers=2, batch_size=16), arrival("c")]
    scheduler = Watched()
    replay(jobs, scheduler, Cluster(1, 3), Ticks(60, change_seconds=0))
    assert {job: len(nodes) for job, nodes in scheduler.held[0].items()} == {"a": 2, "c": 1}
    assert all(len(nodes) == (1 if job == "c" else 2) for held in scheduler.held for job, nodes in held.items())


def test_slots_are_conserved_and_a_replay_repeats_itself() -> None:
    jobs = [
        arrival(f"j{number}", time=37.0 * number, workers=1 + number % 2, batch_size=8 * (1 + number % 2))
        for number in range(20)
    ]
    runs = []
    for _ in range(2):
        scheduler = Watched()
        outcomes = replay(jobs, scheduler, Cluster(3, 2), Events(60, change_seconds=5))
        runs.append((outcomes, scheduler.held))
        for held in scheduler.held:
            assert min(Cluster(3, 2).free(held.values())) >= 0
    assert runs[0] == runs[1]


def test_a_batch_is_split_into_steps() -> None:
    limits = {"initial": 8, "largest_local": 16, "largest_batch": 64}
    assert split_batch(8, 1, **limits) == (8, 0)
    assert split_batch(16, 1, **limits) == (8, 1), "one worker accumulates beyond the initial batch"
    assert split_batch(32, 2, **limits) == (16, 0)
    assert split_batch(64, 2, **limits) == (16, 1)
    assert split_batch(63, 3, **limits) == (10, 1), "never more than the largest batch"


def test_a_placement_stands_for_its_rotations() -> None:
    assert smallest_rotation((3, 4, 4, 1)) == (1, 3, 4, 4)
    assert smallest_rotation((4, 1, 3, 4)) == (1, 3, 4, 4)


def test_times_between_measured_sizes_are_interpolated() -> None:
    sizes = {(1, 2): ((8, 1.0, 0.0),), (3, 6): ((8, 3.0, 1.0),)}
    app = Application("toy", {}, sizes, {8: ((1.0, 1.0, 1.0),)}, 8, 8)
    assert app.step_times((2, 2), 8) == (2.0, 0.5)


def test_gradients_between_measured_batches_are_interpolated() -> None:
    app = Application("toy", {}, {}, {8: ((1.0, 1.0, 2.0),), 16: ((1.0, 3.0, 6.0),)}, 8, 8)
    assert app.gradient(8, 0) == (1.0, 2.0)
    assert app.gradient(12, 0) == (2.0, 4.0)
    assert app.gradient(16, 0) == (3.0, 6.0)


PLACEMENTS = "placement,local_bsz,step_time,sync_time\n1,8,1.0,0.0\n1,16,2.0,0.0\n11,8,1.0,0.5\n"
SCALABILITY = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n4,4,8,1.5,1.0\n"
VALIDATION = "progress,grad_sqr,grad_var\n100,1.0,2.0\n200,1.0,4.0\n"


def write_profile(folder: Path, **files: str) -> Path:
    contents = {
        "placements": PLACEMENTS,
        "scalability": SCALABILITY,
        "validation-8": VALIDATION,
        "validation-32": VALIDATION,
        **files,
    }
    folder.mkdir(parents=True)
    for name, text in contents.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def test_a_profile_is_read(tmp_path: Path) -> None:
    app = read_application(write_profile(tmp_path / "toy"), largest_local=12)
    assert (app.name, app.initial_batch, app.largest_batch) == ("toy", 8, 32)
    assert (app.smallest_local, app.largest_local, app.num_epochs, app.progress_after(2)) == (8, 12, 2, 200.0)
    assert app.step_times((1,), 12) == (1.5, 0.0)
    assert app.step_times((1, 1, 1, 1), 8) == (1.5, 1.0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("placements", PLACEMENTS + "1x,8,1.0,0.0\n", r"placements\.csv, line 5, column placement: '1x' is not"),
        ("placements", PLACEMENTS + "2,8,-1,0.0\n", r"placements\.csv, line 5, column step_time: '-1' is not"),
        ("placements", PLACEMENTS + "1,8,1.0,0.0\n", r"placements\.csv, line 5, column local_bsz: measured twice"),
        ("placements", PLACEMENTS + "1,8\n", r"placements\.csv, line 5: 2 cells, and the header has 4"),
        ("placements", "placement,local_bsz\n1,8\n", r"placements\.csv, line 1, column step_time: the header needs"),
        ("scalability", SCALABILITY + "0,4,8,1.5,1.0\n", r"scalability\.csv, line 3, column num_nodes: '0' is not"),
        ("scalability", SCALABILITY + "4,4,8,nan,1.0\n", r"scalability\.csv, line 3, column step_time: 'nan' is not"),
        ("validation-8", "progress,grad_sqr,grad_var\n", r"validation-8\.csv, line 2: no rows"),
        ("validation-8", VALIDATION + "150,1.0,1.0\n", r"validation-8\.csv, line 4, column progress: .*does not rise"),
        ("validation-8", VALIDATION + "300,1.0,\n", r"validation-8\.csv, line 4, column grad_var: '' is not"),
    ],
)
def test_a_malformed_profile_is_named_by_file_line_and_column(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(MalformedFile, match=message):
        read_application(write_profile(tmp_path / "toy", **{name: text}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_profile(tmp_path / "toy")
    (folder / "scalability.csv").unlink()
    with pytest.raises(MalformedFile, match=r"scalability\.csv, line 1: cannot be read"):
        read_application(folder)


WORKLOAD = "name,time,application,num_replicas,batch_size\nb,20,toy,1,8\na,10,toy,2,32\n"


def test_a_workload_is_read_in_the_order_of_submission(tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(WORKLOAD)
    assert read_arrivals(path, {"toy": TOY}, num_slots=4) == [
        arrival("a", time=10, workers=2, batch_size=32),
        arrival("b", time=20),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c,x,toy,1,8", r"workload\.csv, line 4, column time: 'x' is not a number of seconds"),
        ("c,1,other,1,8", r"workload\.csv, line 4, column application: no profile of 'other': there are toy"),
        ("c,1,toy,0,8", r"workload\.csv, line 4, column num_replicas: '0' is not a whole number of workers"),
        ("c,1,toy,5,32", r"workload\.csv, line 4, column num_replicas: 5 workers, and the cluster has 4 slots"),
        ("c,1,toy,2,8", r"workload\.csv, line 4, column batch_size: 2 workers of toy take 16 to 32 samples"),
        ("a,1,toy,1,8", r"workload\.csv, line 4, column name: there are two jobs a"),
        ("c,1,toy,1", r"workload\.csv, line 4: 4 cells, and the header has 5"),
    ],
)
def test_a_malformed_workload_is_named_by_file_line_and_column(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(f"{WORKLOAD}{line}\n")
    with pytest.raises(MalformedFile, match=message):
        read_arrivals(path, {"toy": TOY}, num_slots=4)


def test_a_job_that_was_always_alone_is_judged_by_the_whole_cluster() -> None:
    cluster, clock = Cluster(1, 1), Events(60, change_seconds=50)
    outcomes = replay([arrival("a")], Tiresias(), cluster, clock)
    (fairness,) = finish_time_fairness([arrival("a")], outcomes, cluster, fixed={"toy": 8})
    assert fairness == pytest.approx((200 + 50) / 200)


def test_of_two_jobs_that_share_equally_one_waits_as_long_as_half_of_the_cluster_would_take() -> None:
    jobs, cluster = [arrival("a"), arrival("b")], Cluster(1, 1)
    outcomes = replay(jobs, Tiresias(), cluster, Events(60, change_seconds=0))
    first, second = finish_time_fairness(jobs, outcomes, cluster, fixed={"toy": 8})
    assert first == pytest.approx(200 / (200 * 2)), "two jobs while it was there"
    assert second == pytest.approx(400 / (200 * 1.5)), "one and a half in the mean"


def test_on_an_equal_share_a_job_has_all_its_workers_and_the_best_batch() -> None:
    jobs, cluster = [arrival("a")], Cluster(1, 2)
    outcomes = replay(jobs, Scripted({"a": (0,)}), cluster, Events(60, change_seconds=0))
    (fairness,) = finish_time_fairness(jobs, outcomes, cluster, fixed={})
    # It trained with a batch of 8 on one worker. A batch of 32 on two makes four times the progress in two seconds.
    assert fairness == pytest.approx(200 / 100)
