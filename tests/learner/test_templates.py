"""What a host decides about templates: workers get one as soon as it helps, and never wait for long."""

from hypothesis import given, settings
from hypothesis import strategies as st

from resile_learner.agent.events import (
    Command,
    EndTemplate,
    ForkWorker,
    PrepareTemplate,
    TemplateEnded,
    TemplateKept,
    TemplateReady,
    WorkerPrepared,
)
from resile_learner.agent.templates import (
    BACKGROUND_SECONDS,
    IDLE_SECONDS,
    KEEP,
    MAX_BYTES,
    MAX_ENDS,
    NOTHING,
    RESTORE_SECONDS,
    RETIRE_SECONDS,
    URGENT_SECONDS,
    Templates,
)

MIB = 1 << 20


def ready(number: int, *, modules: int = 100, num_bytes: int = 100 * MIB) -> TemplateReady:
    return TemplateReady(number, modules, num_bytes)


def warm(templates: Templates, key: str = "k", job: str = "j", number: int = 1) -> None:
    """Have a template of ``key`` that is ready."""
    templates.handle(WorkerPrepared(job, 0, key), 0.0)
    templates.handle(ready(number), 1.0)


def test_the_first_workers_of_a_key_wait_for_one_template_and_later_ones_for_nothing() -> None:
    templates = Templates()
    assert templates.handle(WorkerPrepared("j", 0, "k"), 0.0) == [PrepareTemplate(1, "j", (), is_urgent=True)]
    assert templates.handle(WorkerPrepared("j", 1, "k"), 0.1) == []
    assert templates.handle(ready(1), 1.0) == [ForkWorker("j", 0, 1), ForkWorker("j", 1, 1)]
    assert templates.handle(WorkerPrepared("j", 2, "k"), 2.0) == [ForkWorker("j", 2, 1)]
    assert templates.handle(WorkerPrepared("of the same package", 0, "k"), 9.0) == [
        ForkWorker("of the same package", 0, 1)
    ]


def test_what_a_worker_reports_is_prepared_beside_the_training_and_takes_the_place() -> None:
    templates = Templates()
    warm(templates)
    assert templates.on_imported("j", ["scipy", "scipy.io"], 2.0) == [
        PrepareTemplate(2, "j", ("scipy", "scipy.io"), is_urgent=False)
    ]
    assert templates.on_imported("j", ["scipy.io"], 2.0) == [], "it is known"
    assert templates.handle(WorkerPrepared("j", 1, "k"), 3.0) == [ForkWorker("j", 1, 1)], "nobody waits for it"
    assert templates.handle(ready(2), 4.0) == []
    assert templates.handle(WorkerPrepared("j", 2, "k"), 5.0) == [ForkWorker("j", 2, 2)]
    assert templates.on_tick(["j"], 5.0) == [], "worker 1 may not be forked yet"
    assert templates.on_tick(["j"], 4.1 + RETIRE_SECONDS) == [EndTemplate(1)]


def test_if_it_is_refused_the_first_one_stays() -> None:
    templates = Templates()
    warm(templates)
    templates.on_imported("j", ["bad"], 2.0)
    assert templates.handle(TemplateEnded(2, "threads", is_refused=True), 3.0) == []
    assert templates.on_imported("j", ["bad"], 2.0) == [], "it is not tried again"
    assert templates.handle(WorkerPrepared("j", 1, "k"), 5.0) == [ForkWorker("j", 1, 1)]


def test_templates_of_the_previous_incarnation_are_prepared_again_and_used_by_the_first_workers() -> None:
    templates = Templates()
    assert not templates.is_restoring(0.0)
    assert templates.handle(TemplateKept("old", "k", ("scipy",)), 0.0) == [
        PrepareTemplate(1, "old", ("scipy",), is_urgent=True)
    ]
    templates.handle(TemplateKept("other", "l", ()), 0.0)
    assert templates.is_restoring(1.0)
    assert templates.handle(WorkerPrepared("j", 0, "k"), 1.5) == [], "it waits"
    assert templates.handle(ready(1), 2.0) == [ForkWorker("j", 0, 1)]
    assert templates.is_restoring(2.0)
    templates.handle(TemplateEnded(2, "a thread", is_refused=True), 3.0)
    assert not templates.is_restoring(3.0)
    assert templates.on_imported("j", ["scipy"], 4.0) == [], "it is known"


def test_a_host_waits_for_such_templates_for_a_while_only() -> None:
    templates = Templates()
    templates.handle(TemplateKept("old", "k", ()), 0.0)
    assert templates.is_restoring(RESTORE_SECONDS - 1)
    assert not templates.is_restoring(RESTORE_SECONDS)


def test_a_script_with_nothing_to_import_at_its_head_waits_once_and_never_again() -> None:
    templates = Templates()
    templates.handle(WorkerPrepared("j", 0, "k"), 0.0)
    assert templates.handle(ready(1, modules=0), 1.0) == [EndTemplate(1), ForkWorker("j", 0, None, NOTHING)]
    assert templates.handle(WorkerPrepared("j", 1, "k"), 2.0) == [ForkWorker("j", 1, None, NOTHING)]
    assert templates.on_imported("j", ["late"], 3.0) == [PrepareTemplate(2, "j", ("late",), is_urgent=False)]
    assert templates.handle(WorkerPrepared("j", 2, "k"), 3.5) == [ForkWorker("j", 2, None, NOTHING)]
    assert templates.handle(ready(2), 4.0) == []
    assert templates.handle(WorkerPrepared("j", 3, "k"), 5.0) == [ForkWorker("j", 3, 2)]


def test_a_refusal_is_remembered_with_its_reason() -> None:
    templates = Templates()
    templates.handle(WorkerPrepared("j", 0, "k"), 0.0)
    assert templates.handle(TemplateEnded(1, "a thread", is_refused=True), 1.0) == [
        ForkWorker("j", 0, None, "a thread")
    ]
    assert templates.handle(WorkerPrepared("j", 1, "k"), 2.0) == [ForkWorker("j", 1, None, "a thread")]
    assert templates.on_imported("j", ["late"], 3.0) == []


def test_a_template_that_keeps_dying_is_given_up() -> None:
    templates = Templates()
    for number in range(1, MAX_ENDS + 1):
        (prepare,) = templates.handle(WorkerPrepared("j", number, "k"), 0.0)
        assert isinstance(prepare, PrepareTemplate)
        templates.handle(ready(number), 1.0)
        assert templates.handle(TemplateEnded(number, "signal 9"), 2.0) == []
    assert templates.handle(WorkerPrepared("j", 9, "k"), 3.0) == [ForkWorker("j", 9, None, "signal 9")]


def test_nobody_waits_for_longer_than_the_limit() -> None:
    templates = Templates()
    templates.handle(WorkerPrepared("j", 0, "k"), 0.0)
    assert templates.on_tick(["j"], URGENT_SECONDS - 1) == []
    end, fork = templates.on_tick(["j"], URGENT_SECONDS + 1)
    assert (end, isinstance(fork, ForkWorker) and fork.template) == (EndTemplate(1), None)
    assert templates.handle(ready(1), URGENT_SECONDS + 2) == [EndTemplate(1)], "it comes too late"
    warm(other := Templates())
    other.on_imported("j", ["hangs"], 0.0)
    assert other.on_tick(["j"], BACKGROUND_SECONDS + 1) == [EndTemplate(2)]


def test_a_worker_that_has_ended_is_not_forked() -> None:
    templates = Templates()
    templates.handle(WorkerPrepared("j", 0, "k"), 0.0)
    templates.on_exit("j", 0)
    assert templates.handle(ready(1), 1.0) == []


def test_a_template_outlasts_its_job_for_a_while() -> None:
    templates = Templates()
    warm(templates)
    assert templates.on_tick(["j"], 10 * IDLE_SECONDS) == [], "its job lives"
    templates.handle(WorkerPrepared("j", 1, "k"), 10 * IDLE_SECONDS)
    assert templates.on_tick([], 10.5 * IDLE_SECONDS) == []
    assert templates.on_tick([], 11.1 * IDLE_SECONDS) == [EndTemplate(1)]


def test_templates_are_few_and_small_and_the_least_recently_used_goes_first() -> None:
    templates = Templates()
    for number in range(1, KEEP + 1):
        warm(templates, f"k{number}", f"j{number}", number)
    templates.handle(WorkerPrepared("j1", 1, "k1"), 5.0)
    prepare, end = templates.handle(WorkerPrepared("j", 0, "new"), 6.0)
    assert (isinstance(prepare, PrepareTemplate), end) == (True, EndTemplate(2))
    large = templates.handle(ready(KEEP + 1, num_bytes=MAX_BYTES - 150 * MIB), 7.0)
    assert large == [ForkWorker("j", 0, KEEP + 1), EndTemplate(3), EndTemplate(4)]


KINDS = ["worker", "ready", "ended", "refused", "imported", "tick", "exit"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=60)


class Host:
    """Carries commands out, and sees that each worker is forked once, and from a template that lives."""

    def __init__(self) -> None:
        self.templates = Templates()
        self.waiting: set[tuple[str, int]] = set()
        self.living: set[int] = set()
        self.num_workers = 0

    def act(self, what: str, number: int, now: float) -> list[Command]:
        job = f"j{number}"
        match what:
            case "worker":
                self.num_workers += 1
                self.waiting.add((job, self.num_workers))
                return self.templates.handle(WorkerPrepared(job, self.num_workers, f"k{number}"), now)
            case "ready":
                return self.templates.handle(ready(number, modules=number % 3), now)
            case "ended" | "refused":
                self.living.discard(number)
                return self.templates.handle(TemplateEnded(number, "why", is_refused=what == "refused"), now)
            case "imported":
                return self.templates.on_imported(job, [f"m{now}"], now)
            case "exit":
                for worker in sorted(self.waiting)[:1]:
                    self.waiting.remove(worker)
                    self.templates.on_exit(*worker)
                return []
            case _:
                return self.templates.on_tick([job], now)

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case ForkWorker(job, worker, template):
                    self.waiting.remove((job, worker))
                    assert template is None or template in self.living
                case PrepareTemplate(number):
                    self.living.add(number)
                case EndTemplate(number):
                    self.living.discard(number)
                case _:
                    raise AssertionError(command)


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_whatever_happens_every_worker_is_forked_exactly_once_and_templates_are_bounded(
    steps: list[tuple[str, int]],
) -> None:
    host, now = Host(), 0.0
    for what, number in steps:
        now += 1.0
        host.carry_out(host.act(what, number, now))
        assert len(host.living) <= KEEP + len(KINDS)
    host.carry_out(host.templates.on_tick([], now + URGENT_SECONDS + 1))
    assert not host.waiting
