"""The Pollux OSDI'21 workloads, replayed: mean completion times beside those that were published.

    python bench/pollux.py --data DIR [--quick | --tiny] [--change-seconds 0.53] [--decide-seconds 10]
                           [--workloads NAME ...] [--json]

DIR has `traces/` with a folder of profiles for each application, and `workloads/` with a CSV file for each workload
(repository petuum/adaptdl, branch osdi21-artifact). 16 nodes of 4 GPUs. What policies may see is what Pollux may: what
the job has measured itself and its latest noise scale, up to twice the workers that it ever had, and never what
remains.

First Tiresias, to prove the replay: its published figure within 1 %. Then the policies with the artifact's clock, which
decides every 60 s and costs 30 s a change, and with decisions at each submission and completion and at the latest every
10 s, at 30 s a change and at what one costs in Resile. A first start costs what a change does.

Last the scheduler's own core, as `resile simulate` runs it: with its placement and its throughput model, with workers
that start beside the others before they join, and at both costs of a change.
"""

import csv
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from published.baselines import Tiresias
from published.fairness import finish_time_fairness
from published.policy_scheduler import PolicyScheduler
from published.replay import Clock, Cluster, Events, Scheduler, Ticks, replay
from report import Length, Target, argument_parser, conclude, print_table

from resile_scheduler.policies.elastic_batch import elastic_batch
from resile_scheduler.policies.goodput import goodput
from resile_scheduler.simulation.arrivals import Arrival, read_arrivals
from resile_scheduler.simulation.csv_table import non_negative, positive
from resile_scheduler.simulation.figures import finish_time_fairness as fairness_of_outcome
from resile_scheduler.simulation.profiles import Application, read_application
from resile_scheduler.simulation.simulate import LIKE_LIVE, simulate
from resile_scheduler.simulation.simulate import Settings as CoreSettings
from resile_scheduler.simulation.training import Profiled
from resile_scheduler.simulation.workload import CHECKPOINT_SECONDS, Submission, Workload, equal_hosts
from resile_shared.errors import UsageError
from resile_shared.messages.jobs import JobSpec
from resile_shared.policies import PolicyName

CLUSTER = Cluster(num_nodes=16, slots_per_node=4)
LARGEST_LOCAL = {"yolov3": 8}
"""What fits on a GPU, where more was measured."""
FIXED = {"ncf": 32768}
"""Applications that have one GPU and this batch under the elastic policies."""
ARTIFACT_SECONDS = 30.0
CHANGE_SECONDS = 0.53
"""Training time that a change costs in Resile: `rescale.py`, the larger of the medians in bench/README.md."""
PUBLISHED = {
    "workload-1": (2088.8, 2473.7),
    "workload-2": (3322.9, 5145.0),
    "workload-3": (2188.5, 3876.3),
    "workload-4": (2721.0, 3280.3),
    "workload-5": (2673.7, 3501.0),
    "workload-6": (2446.1, 3469.7),
    "workload-7": (3616.1, 5479.9),
    "workload-8": (2951.9, 5079.7),
}
"""Mean completion times of Pollux and of Tiresias, from the artifact's raw results."""


@dataclass(frozen=True)
class Setting:
    """A scheduler under a clock."""

    policy: str
    clock: Clock

    @property
    def name(self) -> str:
        """Both, for a table."""
        how = "events" if self.clock.on_events else "ticks"
        return f"{self.policy}, {how} of {self.clock.seconds:g} s, {self.clock.change_seconds:g} s a change"

    def scheduler(self) -> Scheduler:
        """Return a new one."""
        makers: dict[str, Callable[[], Scheduler]] = {
            "Tiresias": Tiresias,
            "goodput": lambda: PolicyScheduler(goodput, change_seconds=self.clock.change_seconds, fixed=FIXED),
            "elastic-batch": lambda: PolicyScheduler(
                elastic_batch, change_seconds=self.clock.change_seconds, fixed=FIXED
            ),
        }
        return makers[self.policy]()

    def run(self, arrivals: Sequence[Arrival]) -> "Run":
        """Replay one workload."""
        outcomes = replay(arrivals, self.scheduler(), CLUSTER, self.clock)
        return Run(
            [outcome.completion_time for outcome in outcomes],
            finish_time_fairness(arrivals, outcomes, CLUSTER, fixed=FIXED),
            [outcome.num_changes for outcome in outcomes],
        )


@dataclass(frozen=True)
class CoreSetting:
    """A policy of the scheduler's core, in simulated time."""

    policy: PolicyName
    change_seconds: float

    @property
    def name(self) -> str:
        """Both, for a table."""
        return f"{self.policy}, the scheduler's core, {self.change_seconds:g} s a change"

    def run(self, arrivals: Sequence[Arrival]) -> "Run":
        """Simulate one workload."""
        jobs = tuple(itertools.starmap(_submission, enumerate(arrivals, 1)))
        workload = Workload(jobs, hosts=equal_hosts(CLUSTER.num_slots, CLUSTER.num_nodes))
        delays = replace(LIKE_LIVE, change=self.change_seconds)
        outcome = simulate(workload, CoreSettings(self.policy, delays=delays))
        return Run(
            [job.seconds for job in outcome.jobs if job.seconds is not None],
            [float(fairness) for fairness in fairness_of_outcome(outcome)],
            [job.num_changes for job in outcome.jobs],
        )


def _submission(number: int, arrival: Arrival) -> Submission:
    fixed = FIXED.get(arrival.application.name)
    training = Profiled(arrival.application, fixed or arrival.application.initial_batch, is_fixed=fixed is not None)
    most = 1 if fixed else training.num_shards
    spec = JobSpec(name=arrival.job, package="packages/1", script="train.py", max_workers=most)
    return Submission(arrival.time, f"job-{number}", spec, training, CHECKPOINT_SECONDS, bits="fast")


@dataclass(frozen=True)
class Run:
    """What came of the jobs of one workload: completion times in seconds, fairness, and numbers of changes."""

    seconds: Sequence[float]
    fairness: Sequence[float]
    changes: Sequence[int]


@dataclass(frozen=True)
class Figures:
    """One workload under one setting. Seconds; ``fairness`` is by the completion time on an equal share."""

    workload: str
    setting: str
    mean: float
    median: float
    p99: float
    fairness_median: float
    fairness_worst: float
    changes: float
    """Of a job, in the mean."""
    by_pollux: float | None
    """The mean by Pollux' published one."""


def settings(change_seconds: float, decide_seconds: float) -> list[Setting | CoreSetting]:
    """Return what is compared; the first proves the replay, then come policies at the artifact's cost and at ours."""
    artifact = Ticks(60.0, ARTIFACT_SECONDS)
    return [
        Setting("Tiresias", artifact),
        Setting("elastic-batch", artifact),
        Setting("goodput", artifact),
        Setting("goodput", Events(decide_seconds, ARTIFACT_SECONDS)),
        Setting("goodput", Events(decide_seconds, change_seconds)),
        CoreSetting(PolicyName.GOODPUT, ARTIFACT_SECONDS),
        CoreSetting(PolicyName.GOODPUT, change_seconds),
    ]


def measure(name: str, arrivals: Sequence[Arrival], setting: Setting | CoreSetting) -> Figures:
    """Run one workload."""
    run = setting.run(arrivals)
    mean = statistics.fmean(run.seconds)
    return Figures(
        workload=name,
        setting=setting.name,
        mean=mean,
        median=statistics.median(run.seconds),
        p99=float(np.quantile(run.seconds, 0.99)),
        fairness_median=statistics.median(run.fairness),
        fairness_worst=max(run.fairness),
        changes=statistics.fmean(run.changes),
        by_pollux=mean / PUBLISHED[name][0] if name in PUBLISHED else None,
    )


def measure_all(workloads: dict[str, list[Arrival]], compared: Sequence[Setting | CoreSetting]) -> list[Figures]:
    """Replay each workload under each setting, on all processors; in the order of the settings."""
    tasks = [(name, arrivals, setting) for setting in compared for name, arrivals in workloads.items()]
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1)) as pool:
        return list(pool.map(measure, *zip(*tasks, strict=True)))


def read_data(folder: Path, names: Sequence[str] | None) -> dict[str, list[Arrival]]:
    """Return the workloads of a folder by name, all or those that are named."""
    applications: dict[str, Application] = {
        path.name: read_application(path, largest_local=LARGEST_LOCAL.get(path.name))
        for path in sorted((folder / "traces").glob("*"))
        if path.is_dir()
    }
    files = {path.stem: path for path in sorted((folder / "workloads").glob("*.csv"))}
    if unknown := set(names or ()) - files.keys():
        raise SystemExit(f"no workload {', '.join(sorted(unknown))} in {folder}/workloads: {', '.join(files)}")
    if not files or not applications:
        raise SystemExit(f"{folder} needs workloads/*.csv and traces/APPLICATION/*.csv")
    return {
        name: read_arrivals(path, applications, num_slots=CLUSTER.num_slots)
        for name, path in files.items()
        if not names or name in names
    }


def rows(figures: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Return a row for each workload, and one of means."""

    def row(name: str, chosen: Sequence[Figures]) -> tuple[str, ...]:
        means = {
            field: statistics.fmean(getattr(figure, field) for figure in chosen)
            for field in ("mean", "median", "p99", "fairness_median", "fairness_worst", "changes")
        }
        ratio = by_published([f for f in chosen if f.by_pollux is not None])
        return (
            name,
            *(f"{means[field]:.0f}" for field in ("mean", "median", "p99")),
            f"{ratio:.3f}" if ratio else "-",
            *(f"{means[field]:.2f}" for field in ("fairness_median", "fairness_worst", "changes")),
        )

    return [*(row(figure.workload, [figure]) for figure in figures), row("mean", figures)]


def by_published(figures: Sequence[Figures], *, index: int = 0) -> float | None:
    """Return the sum of the means by the sum of those of Pollux (0) or Tiresias (1) on the same workloads."""
    known = [figure for figure in figures if figure.workload in PUBLISHED]
    if not known:
        return None
    return sum(f.mean for f in known) / sum(PUBLISHED[f.workload][index] for f in known)


def targets(by_setting: Sequence[Sequence[Figures]]) -> list[Target]:
    """Return what is promised of the workloads whose figures were published."""
    tiresias, _, ticks, _, cheap, *_ = by_setting
    found = [
        Target(f"{f.workload}, Tiresias off its published figure", abs(ratio - 1) * 100, 1.0, "%")
        for f in tiresias
        if (ratio := by_published([f], index=1))
    ]
    for figures, limit in ((ticks, 0.97), (cheap, 0.82)):
        if ratio := by_published(figures):
            found.append(Target(f"{figures[0].setting}, by Pollux' mean", ratio, limit))
    return found


def write_made_up(folder: Path) -> None:
    """Write a profile and a workload that mean nothing."""
    profile = folder / "traces" / "toy"
    profile.mkdir(parents=True)
    times = [
        (nodes, workers, local, 0.01 * local + 0.05 * nodes, 0.05 * nodes)
        for nodes, workers, local in itertools.product((1, 2, 4, 16), (4, 16, 64), (8, 32))
        if workers <= 4 * nodes
    ]
    _write(profile / "placements.csv", "placement,local_bsz,step_time,sync_time", [(1, 8, 0.1, 0.0), (1, 32, 0.3, 0.0)])
    _write(profile / "scalability.csv", "num_nodes,num_replicas,local_bsz,step_time,sync_time", times)
    for batch in (8, 2048):
        progress = [(100.0 * epoch, 1.0, 10.0) for epoch in (1, 2, 3)]
        _write(profile / f"validation-{batch}.csv", "progress,grad_sqr,grad_var", progress)
    (folder / "workloads").mkdir()
    jobs = [(f"toy-{number}", 50 * number, "toy", 4, 128) for number in range(6)]
    _write(folder / "workloads" / "made-up.csv", "name,time,application,num_replicas,batch_size", jobs)


def _write(path: Path, header: str, lines: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header.split(","), *lines])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, help="the folder with traces/ and workloads/")
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="only these")
    parser.add_argument(
        "--change-seconds", type=non_negative, default=CHANGE_SECONDS, help="what a change costs in Resile"
    )
    parser.add_argument("--decide-seconds", type=positive, default=10.0, help="the longest time between decisions")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    args = parser.parse_args()
    if args.data is None and args.length is not Length.TINY:
        parser.error("--data DIR is needed: the data is not part of this project")
    with tempfile.TemporaryDirectory(prefix="resile-bench-") as made_up:
        if args.data is None:
            write_made_up(Path(made_up))
        try:
            workloads = read_data(args.data or Path(made_up), args.workloads)
        except UsageError as error:
            parser.error(str(error))
    if args.length is Length.QUICK:
        workloads = dict(itertools.islice(workloads.items(), 1))
    compared = settings(args.change_seconds, args.decide_seconds)
    figures = measure_all(workloads, compared)
    by_setting = [list(chunk) for chunk in np.array(figures, dtype=object).reshape(len(compared), -1)]
    verdicts = targets(by_setting)
    if args.json:
        found = {"figures": [asdict(figure) for figure in figures], "targets": [v._asdict() for v in verdicts]}
        print(json.dumps(found, indent=2))
        return
    header = ("", "mean s", "median s", "p99 s", "by Pollux'", "fairness", "worst", "changes")
    for setting, chosen in zip(compared, by_setting, strict=True):
        print_table(setting.name, header, rows(chosen))
    conclude(verdicts, args.length)


if __name__ == "__main__":
    main()
