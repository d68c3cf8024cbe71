"""What an allocation costs follows from its job: hosts that have no worker of it are not told of it."""

from .campaign import live
from .plan import Plan, Submission
from .training import SimScript

NUM_HOSTS = NUM_JOBS = 20


def plan() -> Plan:
    """A pool whose slots are not enough for all jobs, so that they grow and shrink as others come and end."""
    script = SimScript(
        num_samples=320,
        batch_size=16,
        num_shards=4,
        epochs=1,
        shard_seconds=0.1,
        import_seconds=0.5,
        checkpoint_every=None,
    )
    jobs = tuple(
        Submission(at=0.3 * number, script=script, min_workers=1, max_workers=4, priority=5000)
        for number in range(NUM_JOBS)
    )
    return Plan(
        seed=1,
        slots=(2,) * NUM_HOSTS,
        num_schedulers=1,
        policy="fairshare",
        jobs=jobs,
        actions=(),
        faults=(),
        calm_at=1.0,
    )


def test_an_agent_is_sent_the_allocations_of_its_hosts_jobs_and_no_others() -> None:
    world, broken = live(plan())
    assert broken == []
    hosts_of: dict[str, set[str]] = {}
    for (job, _), slot in world.checks.slots.items():
        hosts_of.setdefault(job, set()).add(slot.partition("/")[0])
    assert len(hosts_of) == NUM_JOBS
    sent, stored = world.checks.sent, world.checks.stored
    assert sent.keys() == {(host, job) for job, hosts in hosts_of.items() for host in hosts}
    assert all(sent[host, job] <= stored[job] for host, job in sent)
    assert sent.total() < NUM_HOSTS * stored.total() / 5
