"""Draws the plan of a world from its seed.

What worlds have gained since is drawn apart, so that the rest of each world stays as it was.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from resile_shared.policies import PolicyName

from .packages import SimPackages
from .plan import (
    CRITICAL,
    CRITICAL_TRIGGERS,
    LONGEST_SECONDS,
    RARE,
    REMOVALS,
    SHARING,
    THEMES,
    Action,
    Fault,
    Plan,
    Submission,
    Theme,
)
from .training import SimScript

TENANTS = ("default", "a", "b")


def draw(seed: int) -> Plan:
    """Draw the plan of ``seed``. Some plans are mild: what goes wrong without faults must be found as well."""
    rng = random.Random(f"{seed} plan")
    theme = rng.choice(THEMES)
    slots = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(max(theme.num_hosts, rng.choice((1, 2, 2, 3)))))
    kinds = tuple(rng.choice((0, 1)) for _ in slots) if rng.random() < 0.15 else (0,) * len(slots)
    room = max(sum(n for n, kind in zip(slots, kinds, strict=True) if kind == one) for one in kinds)
    are_short = rng.random() < 0.3 and not theme.has_long_jobs  # many jobs in a row on the same slots
    most = (1, 1, 2) if theme.has_long_jobs else (1, 1, 2, 2, 3, 5)
    num_jobs = rng.choice((4, 6, 8)) if are_short else rng.choice(most)
    jobs = tuple(_submission(rng, room, theme, is_short=are_short) for _ in range(num_jobs))
    jobs = _with_packages(seed, jobs, len(slots))
    labels = _labels(seed, len(slots))
    jobs = _with_groups(seed, jobs, slots=slots, kinds=kinds, labels=labels)
    chosen, triggers = theme.faults, theme.triggers
    if not theme.is_narrow:
        num_kinds = rng.randint(1, min(rng.choice((3, 100)), len(chosen)))  # few of them act undisturbed
        chosen, triggers = tuple(rng.sample(chosen, num_kinds)), rng.choice((("",), triggers))
    moments = _moments(rng, jobs, max(theme.num_faults, rng.choice((0, 1, 2, 4, 8, 16))))
    faults = [_fault(rng, rng.choice(chosen), at, rng.choice(triggers), theme.seconds) for at in moments]
    moments = _moments(rng, jobs, max(theme.num_actions, rng.choice((0, 0, 1, 3, 6, 12))))
    actions = [_action(rng, rng.choice(theme.actions), at) for at in moments]
    ends = [*(fault.at + fault.seconds for fault in faults), *(each.at for each in (*jobs, *actions))]
    plan = Plan(
        seed=seed,
        slots=slots,
        num_schedulers=rng.choice((1, 1, 2)),
        policy=rng.choice(("fairshare", "fairshare", "priority")),
        jobs=jobs,
        actions=tuple(actions),
        faults=tuple(faults),
        calm_at=max(ends) + 1.0,
        kinds=kinds,
        labels=labels,
    )
    for add in (
        _with_sharing,
        _with_gangs,
        _with_removals,
        _with_hidden_storage,
        _with_limited_files,
        _with_critical_moments,
        _with_batch_ranges,
    ):
        plan = add(plan)
    return plan


def _with_batch_ranges(plan: Plan) -> Plan:
    """Let the pools of some worlds choose the global batches of jobs, by a policy that does."""
    rng = random.Random(f"{plan.seed} batch ranges")
    if rng.random() < 0.85:
        return plan

    def ranged(job: Submission) -> Submission:
        most = rng.choice((None, 2, 4, 8))
        if most is None or job.gang:
            return job
        return replace(job, script=replace(job.script, most_batch=most * job.script.batch_size))

    policy = rng.choice((plan.policy, "goodput", "goodput", "elastic-batch"))
    return replace(plan, policy=policy, jobs=tuple(map(ranged, plan.jobs)))


def _with_critical_moments(plan: Plan) -> Plan:
    """Let users of some worlds change what schedulers decide by as these decide, and let faults come just then."""
    rng = random.Random(f"{plan.seed} critical moments")
    if rng.random() < 0.85:
        return plan
    jobs = tuple(replace(job, tenant=rng.choice(TENANTS)) for job in plan.jobs)
    kinds = (*CRITICAL, "settings", "delete") if plan.removes else CRITICAL
    triggers = ("", "", "write", "allocation", "report", "worker starts", "sharing")
    actions = [
        replace(_action(rng, rng.choice(kinds), min(at, plan.calm_at)), trigger=rng.choice(triggers))
        for at in _moments(rng, jobs, rng.choice((2, 4, 8, 12)))
    ]
    chosen = ("crash scheduler", "crash scheduler", "freeze scheduler", "cut bus", "restart bus", "crash registry")
    faults = [
        _fault(rng, rng.choice(chosen), min(at, plan.calm_at), rng.choice(CRITICAL_TRIGGERS), (0.05, 0.5, 5.0))
        for at in _moments(rng, jobs, rng.choice((1, 2, 4, 8)))
    ]
    return replace(
        plan,
        jobs=jobs,
        actions=tuple(sorted((*plan.actions, *actions), key=lambda action: action.at)),
        faults=(*plan.faults, *faults),
        calm_at=max(plan.calm_at, *(each.at + 1.0 for each in (*actions, *faults))),
        keeps_policy=rng.random() < 0.7,
    )


def _with_limited_files(plan: Plan) -> Plan:
    """Let workers of some worlds be unable to follow a growth, for lack of files that they may open."""
    rng = random.Random(f"{plan.seed} limited files")
    if rng.random() < 0.85:
        return plan
    faults = [
        _fault(rng, "limit files", min(at, plan.calm_at), rng.choice(("", "allocation", "worker starts")), (5.0, 30.0))
        for at in _moments(rng, plan.jobs, rng.choice((1, 2, 4)))
    ]
    return replace(plan, faults=(*plan.faults, *faults))


def _with_hidden_storage(plan: Plan) -> Plan:
    """Let the checkpoints of some worlds be gone for a while, when there are some, and all workers with them."""
    rng = random.Random(f"{plan.seed} hidden storage")
    if rng.random() < 0.85:
        return plan
    trigger = rng.choice(("", "checkpoint", "load"))
    (at,) = _moments(rng, plan.jobs, 1)
    fault = _fault(rng, "hidden storage", min(at, plan.calm_at), trigger, (0.5, 5.0, 15.0))
    return replace(plan, faults=(*plan.faults, fault), calm_at=max(plan.calm_at, fault.at + fault.seconds + 1.0))


def _with_removals(plan: Plan) -> Plan:
    """Let users of some worlds delete jobs as they end, and their pools forget jobs and hosts soon."""
    rng = random.Random(f"{plan.seed} removals")
    if rng.random() < 0.75:
        return plan
    moments = _moments(rng, plan.jobs, rng.choice((2, 4, 8)))
    actions = [_action(rng, rng.choice(REMOVALS), min(at, plan.calm_at)) for at in moments]
    both = sorted((*plan.actions, *actions), key=lambda action: action.at)
    return replace(plan, actions=tuple(both), removes=True)


def _with_gangs(plan: Plan) -> Plan:
    """Let some jobs of some worlds be gangs, which may need all slots of a host or of a kind of hosts."""
    rng = random.Random(f"{plan.seed} gangs")
    if rng.random() < 0.75:
        return plan
    room = max(sum(n for n, kind in zip(plan.slots, plan.kinds, strict=True) if kind == one) for one in plan.kinds)
    jobs = tuple(job if rng.random() < 0.5 else _as_gang(rng, job, room) for job in plan.jobs)
    return replace(plan, jobs=jobs)


def _as_gang(rng: random.Random, job: Submission, room: int) -> Submission:
    size = job.min_workers if job.group else min(job.max_workers, room)
    sound = replace(job.script, raises_at=None, hangs_at=None, exits_at=None, differs=False, only_on=None)
    return replace(
        job, script=sound, min_workers=size, max_workers=size, sizes=(), gang=True, restartable=rng.random() < 0.7
    )


def _with_sharing(plan: Plan) -> Plan:
    """Let some pools share their slots by any policy and among tenants, which users change as it runs."""
    rng = random.Random(f"{plan.seed} sharing")
    if rng.random() < 0.5:
        return plan
    jobs = tuple(
        replace(
            job,
            tenant=rng.choice(TENANTS),
            sizes=_sizes(rng, job),
            deadline_seconds=rng.choice((None, None, 150.0, 1000.0)),
        )
        for job in plan.jobs
    )
    moments = [0.1, *_moments(rng, jobs, rng.choice((0, 2, 6)))]
    actions = [_action(rng, rng.choice(SHARING), min(at, plan.calm_at)) for at in moments]
    return replace(
        plan,
        policy=rng.choice(list(PolicyName)).value,
        jobs=jobs,
        actions=tuple(sorted((*plan.actions, *actions), key=lambda action: action.at)),
    )


def _sizes(rng: random.Random, job: Submission) -> tuple[int, ...]:
    """Allow any number of workers, or the job's minimum and some others."""
    others = [size for size in (1, 2, 3, 4, 6) if rng.random() < 0.5]
    return rng.choice(((), tuple(sorted({job.min_workers, *others}))))


def _moments(rng: random.Random, jobs: Sequence[Submission], count: int) -> list[float]:
    """Draw when things happen: most often while a job trains, and often shortly after one another."""
    moments: list[float] = []
    for _ in range(count):
        how, job = rng.random(), rng.choice(jobs)
        if moments and how < 0.4:
            at = moments[-1] + rng.choice((0.01, 0.3, 3.0)) * rng.random()
        elif how < 0.9:
            at = job.at + rng.uniform(0.0, 1.5 * job.seconds + 1.0)
        else:
            at = rng.uniform(1.0, LONGEST_SECONDS)
        moments.append(min(max(1.0, at), LONGEST_SECONDS))
    return sorted(moments)


def _submission(rng: random.Random, num_slots: int, theme: Theme, *, is_short: bool) -> Submission:
    is_long = theme.has_long_jobs
    num_shards = rng.choice((1, 2, 4) if is_short else (4, 8) if is_long else (1, 2, 4, 8))
    batch_size = 2 * num_shards
    per_epoch = rng.choice((2, 5) if is_short else (12, 40) if is_long else (2, 5, 12, 40))
    script = SimScript(
        num_samples=batch_size * per_epoch - rng.choice((0, 1)),
        batch_size=batch_size,
        num_shards=num_shards,
        epochs=1 if is_short else rng.choice((1, 1, 2, 3)),
        shard_seconds=rng.choice((0.05, 0.2) if is_long else (0.005, 0.05, 0.2)),
        import_seconds=rng.choice((0.1, 1.0) if is_short else (0.1, 1.0, 5.0)),
        checkpoint_every=rng.choice((1, 2, 5) if theme.saves_often else (None, 1, 5, 20)),
    )
    if rng.random() < 0.08:
        script = replace(script, **_defect(rng, script))
    least = min(rng.choice((1, 1, 1, 2)), num_slots)
    return Submission(
        at=rng.uniform(0.0, 20.0),
        script=script,
        min_workers=least,
        max_workers=max(least, rng.choice((2, 2, 4, 6) if is_long else (1, 2, 2, 4, 6))),
        priority=rng.choice((1000, 5000, 5000, 10_000)),
    )


def _with_packages(seed: int, jobs: tuple[Submission, ...], num_hosts: int) -> tuple[Submission, ...]:
    """Let some jobs of some worlds require packages; several of them may require the same."""
    rng = random.Random(f"{seed} packages")
    if rng.random() < 0.7:
        return jobs
    kinds = [
        SimPackages(
            build_seconds=rng.choice((0.1, 1.0, 10.0)),
            is_missing=rng.random() < 0.15,
            failing_host=rng.choice((0, 0, rng.randint(1, num_hosts))),
        )
        for _ in range(rng.choice((1, 2, 3)))
    ]
    return tuple(replace(job, packages=rng.choice((None, *kinds, *kinds))) for job in jobs)


def _labels(seed: int, num_hosts: int) -> tuple[str, ...]:
    """Give the hosts of some worlds labels."""
    rng = random.Random(f"{seed} labels")
    if num_hosts == 1 or rng.random() < 0.6:
        return ()
    return tuple(f"gpu={rng.choice('ab')},zone={rng.choice('xy')}" for _ in range(num_hosts))


def _with_groups(
    seed: int, jobs: tuple[Submission, ...], *, slots: Sequence[int], kinds: Sequence[int], labels: Sequence[str]
) -> tuple[Submission, ...]:
    """Let jobs ask for labels of hosts that are enough for them: one, or all of a host."""
    rng = random.Random(f"{seed} groups")
    offered = sorted({group for each in labels for group in (each, *each.split(","))})

    def fits(job: Submission, group: str) -> bool:
        room = Counter[int]()
        for num, kind, of_host in zip(slots, kinds, labels, strict=True):
            room[kind] += num if set(group.split(",")) <= set(of_host.split(",")) else 0
        return max(room.values()) >= job.min_workers

    fitting = [[group for group in offered if fits(job, group)] for job in jobs]
    return tuple(replace(job, group=rng.choice(("", *some, *some))) for job, some in zip(jobs, fitting, strict=True))


def _defect(rng: random.Random, script: SimScript) -> dict[str, object]:
    kind = rng.choice(("raises_at", "hangs_at", "exits_at", "differs"))
    value = True if kind == "differs" else rng.randrange(-1, script.iterations)
    return {kind: value, "only_on": rng.choice((None, 0, 1))}


def _fault(rng: random.Random, kind: str, at: float, trigger: str, seconds: Sequence[float]) -> Fault:
    return Fault(
        at=rng.uniform(1.0, at) if trigger in RARE else at,
        kind=kind,
        target=rng.randrange(1000),
        seconds=rng.choice(seconds) * rng.uniform(0.5, 1.5),
        number=rng.choice((0, 0, rng.randrange(3), rng.randrange(200))),
        trigger=trigger,
    )


def _action(rng: random.Random, kind: str, at: float) -> Action:
    return Action(
        at=at,
        kind=kind,
        target=rng.randrange(1000),
        value=rng.choice((100, 5000, 20_000)),
    )
