"""What was used is shown exactly: by tenant and job, in hours, with the jobs that are removed."""

from datetime import UTC, datetime, timedelta

from resile_monitor.views import usage_view
from resile_shared.bus.subjects import USAGE
from resile_shared.http.api import UsageView
from resile_shared.messages.jobs import JobRecord
from resile_shared.messages.usage import RemovedUsage, SlotUsage, hold

from .examples import SPEC, job
from .monitors import Monitors, Scene

NOON = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)


def record(name: str, tenant: str, usage: SlotUsage) -> JobRecord:
    return job(name, spec=SPEC.model_copy(update={"tenant": tenant}), usage=usage)


def held(slots: int, *, hours: float) -> SlotUsage:
    """The usage of a job that held ``slots`` until noon."""
    return hold(hold(SlotUsage(), slots, now=NOON - timedelta(hours=hours)), 0, now=NOON)


def view(*records: JobRecord, removed: tuple[RemovedUsage, ...] = (), **query: object) -> UsageView:
    options = {"tenant": None, "hours": None, "now": NOON} | query
    return usage_view(records, removed, **options)  # type: ignore[arg-type]


def test_what_is_held_now_counts_until_now() -> None:
    (tenant,) = view(record("job-1", "a", hold(SlotUsage(), 4, now=NOON - timedelta(minutes=90)))).tenants
    assert (tenant.tenant, tenant.slot_hours, tenant.slots) == ("a", 6.0, 4)
    assert [(one.id, one.slot_hours, one.slots) for one in tenant.jobs] == [("job-1", 6.0, 4)]


def test_removed_jobs_stay_counted_and_nothing_is_counted_twice() -> None:
    removed = RemovedUsage(tenant="a", used=held(2, hours=5), jobs=("job-1",))
    shown = view(record("job-1", "a", held(2, hours=5)), record("job-2", "b", held(1, hours=1)), removed=(removed,))
    assert [(one.tenant, one.slot_hours, one.removed_slot_hours) for one in shown.tenants] == [
        ("a", 10.0, 10.0),
        ("b", 1.0, 0.0),
    ]


def test_the_last_hours_count_from_the_beginning_of_an_hour() -> None:
    late = NOON + timedelta(minutes=30)
    shown = view(record("job-1", "a", held(1, hours=10)), hours=2, now=late)
    assert (shown.since, shown.until) == (NOON - timedelta(hours=2), late)
    assert [tenant.slot_hours for tenant in shown.tenants] == [2.0]
    assert view(record("job-1", "a", held(1, hours=10)), hours=2, now=NOON + timedelta(hours=9)).tenants == ()


def test_usage_by_the_hour_is_kept_for_a_week_and_its_total_for_good() -> None:
    usage = hold(SlotUsage(), 3, now=NOON - timedelta(days=30))
    usage = hold(usage, 0, now=NOON)
    assert len(usage.hours) <= 169
    assert [tenant.slot_hours for tenant in view(record("job-1", "a", usage), hours=168).tenants] == [3 * 168.0]
    assert [tenant.slot_hours for tenant in view(record("job-1", "a", usage)).tenants] == [3 * 30 * 24.0]


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    usage = hold(SlotUsage(), 3, now=NOON)
    back = hold(usage, 2, now=NOON - timedelta(hours=1))
    assert (back.slot_milliseconds, back.since) == (0, NOON)


async def test_usage_is_answered_over_http(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(record("job-1", "a", held(2, hours=5)))
    removed = RemovedUsage(tenant="b", used=held(1, hours=3))
    await scene.scheduler.bucket(USAGE).create("b", removed)
    monitor = await monitors.start()
    shown = await monitor.get("/v1/usage", UsageView)
    assert [(tenant.tenant, tenant.slot_hours) for tenant in shown.tenants] == [("a", 10.0), ("b", 3.0)]
    shown = await monitor.get("/v1/usage?tenant=b", UsageView)
    assert [tenant.tenant for tenant in shown.tenants] == ["b"]
    assert (await monitor.get("/v1/usage?hours=24", UsageView)).tenants == (), "it is long ago"
    for query in ("hours=0", "hours=169", "hours=x", "tenant=a%20b", "since=1"):
        problem = await monitor.problem("GET", f"/v1/usage?{query}")
        assert (problem.status, problem.code) == (422, "invalid")
