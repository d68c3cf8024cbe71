"""A job stays on the class of device on which it may have trained, since another one gives other bits."""

from resile_scheduler.core.events import Tick
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import JobState

from .test_core import Bench, gone, ready, worker


class TwoClasses(Bench):
    """Host 1 has four slots of one class, host 2 three of another; the job needs two."""

    def __init__(self) -> None:
        super().__init__()
        self.host("host-1", 4, device_class="cpu-a")
        self.host("host-2", 3, device_class="cpu-b")
        self.submit(min_workers=2, max_workers=2)

    def lose(self, host: str) -> None:
        lost = self.hosts[host].model_copy(update={"state": HostState.LOST})
        self.hosts[host] = lost
        self.tell(lost)

    @property
    def hosts_of_job(self) -> set[str]:
        return {placement.host for placement in self.newest().placements}

    @property
    def device_class(self) -> str:
        return self.records["job-1"].device_class


def test_a_job_that_has_no_order_yet_starts_on_another_class_when_its_host_is_lost() -> None:
    bench = TwoClasses()
    assert bench.hosts_of_job == {"host-1"}
    bench.lose("host-1")
    assert bench.hosts_of_job == {"host-2"}


def test_a_job_whose_host_is_lost_after_the_order_may_have_trained_there() -> None:
    bench = TwoClasses()
    bench.listen()
    assert bench.newest().has_addresses
    bench.lose("host-1")
    assert (bench.hosts_of_job, bench.records["job-1"].state) == (set(), JobState.QUEUED)
    bench.restart()
    assert bench.hosts_of_job == set()
    bench.host("host-3", 2, device_class="cpu-a")
    assert bench.hosts_of_job == {"host-3"}


def test_a_start_whose_members_never_trained_binds_the_job_to_no_class() -> None:
    bench = TwoClasses()
    bench.listen()
    assert bench.device_class == "cpu-a"
    bench.beat(gone(0, kind="killed"), worker(1))
    assert (bench.records["job-1"].state, bench.device_class) == (JobState.QUEUED, "")
    bench.beat(gone(0, kind="killed"), gone(1))
    bench.lose("host-1")
    bench.now += 30.0
    bench.tell(Tick())
    bench.beat(host="host-2")
    assert bench.hosts_of_job == {"host-2"}


def test_a_start_that_ends_without_training_leaves_an_earlier_class_as_it_is() -> None:
    bench = TwoClasses()
    bench.listen()
    bench.lose("host-1")
    bench.host("host-3", 2, device_class="cpu-a")
    bench.beat(*(worker(p.worker, p.slot) for p in bench.newest().placements), host="host-3")
    first, second = (p.worker for p in bench.newest().placements)
    bench.beat(gone(first, 0, kind="killed"), worker(second, 1), host="host-3")
    assert (bench.records["job-1"].state, bench.device_class) == (JobState.QUEUED, "cpu-a")


def test_a_worker_that_trained_and_is_gone_before_its_report_arrives_is_a_lost_member() -> None:
    bench = TwoClasses()
    bench.listen()
    generation = bench.newest().generation
    bench.report(ready())
    bench.beat(
        worker(0).model_copy(update={"state": "member", "generation": generation}),
        gone(1, kind="killed").model_copy(update={"generation": generation}),
    )
    assert (bench.device_class, bench.newest().is_recovery) == ("cpu-a", True)
    assert [placement.worker for placement in bench.newest().placements] == [0]


def test_a_job_that_trains_fast_may_use_all_classes() -> None:
    bench = TwoClasses()
    bench.listen()
    bench.report(ready().model_copy(update={"bits": "fast"}))
    bench.switch()
    assert bench.device_class == ""


def test_a_gang_is_bound_to_no_class() -> None:
    bench = Bench()
    bench.host("host-1", 2, device_class="cpu-a")
    bench.submit(min_workers=2, max_workers=2, gang=True)
    bench.listen()
    assert (bench.newest().has_addresses, bench.records["job-1"].device_class) == (True, "")
