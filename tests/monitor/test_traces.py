"""What monitors keep of traces, and what they make of a history and of these."""

import asyncio

import pytest
from pydantic import ValidationError

from resile_monitor import kept_traces as kept
from resile_monitor.changes import TracedItem, changes_of
from resile_monitor.kept_traces import Traces
from resile_monitor.settings import MonitorSettings
from resile_shared.bus import subjects
from resile_shared.http.api import ChangeList, TraceView
from resile_shared.messages.allocations import Loss
from resile_shared.messages.jobs import HistoryItem
from resile_shared.messages.message import at
from resile_shared.messages.spans import MAX_ATTRIBUTES, MAX_SPAN_EVENTS, SpanEvent
from resile_shared.telemetry.traces import set_up_tracing, traced
from resile_testing.waiting import PATIENCE_SECONDS

from .examples import job
from .monitors import Monitors, Scene
from .spans import FIRST, SECOND, message, span
from .test_page import items, store


def item(
    number: int,
    kind: str,
    seconds: float,
    slots: str = "",
    reason: str = "",
    iteration: int = 0,
    loss: Loss | None = None,
) -> HistoryItem:
    names = tuple(slots.split())
    return HistoryItem(
        number=number,
        time=at(seconds),
        kind=kind,
        generation=number,
        workers=len(names),
        slots=names,
        iteration=iteration,
        reason=reason,
        loss=loss,
    )


LOST_HOST = Loss(reason="host-2 lost", host="host-2")
FIVE = "host-1/0 host-1/1 host-1/2 host-2/0 host-2/1"
HISTORY = (
    TracedItem(item(1, "accepted", 10.0), FIRST),
    TracedItem(item(2, "allocation", 12.0, FIVE, "start"), FIRST),
    TracedItem(item(3, "allocation", 20.25, "host-1/0 host-1/1 host-1/2", "host-2 lost", 7, LOST_HOST), SECOND),
    TracedItem(item(4, "allocation", 25.0, FIVE, "fair share", iteration=50), "3" * 32),
)
LOSS = (
    span(1, "worker suspected", begin=20.12, end=20.13, trace=SECOND),
    span(2, "iteration", begin=20.0, end=20.12, trace=SECOND, iteration=7, abandoned=True),
    span(3, "iteration", begin=20.25, end=20.3, trace=SECOND, iteration=7),
)


def test_the_loss_of_a_host_is_told_in_one_sentence() -> None:
    traces = Traces()
    traces.add(message(*LOSS))
    start, loss, growth = changes_of("job-1", "digits", HISTORY, traces)
    assert loss.summary == (
        "host-2 was lost at 1970-01-01T00:00:20.120Z, 0.12 s into iteration 7; 2 of 5 workers of digits were there; "
        "training went on after 0.13 s and lost 0.25 s in all; replacements joined at 1970-01-01T00:00:25.000Z."
    )
    assert (loss.kind, loss.workers_before, loss.workers, loss.items, loss.trace) == ("recovery", 5, 3, (3,), SECOND)
    assert loss.has_spans
    assert loss.seconds == 0.25
    assert (start.kind, start.items, start.has_spans) == ("start", (1, 2), False)
    assert start.summary == (
        "digits was submitted at 1970-01-01T00:00:10.000Z; 5 workers began to train at iteration 0."
    )
    assert growth.kind == "resize"
    assert "from 3 to 5 workers at 1970-01-01T00:00:25.000Z (fair share)" in growth.summary


def test_the_loss_of_one_worker_is_not_that_of_its_host_and_its_replacement_does_not_count_as_time_lost() -> None:
    three = "host-1/1 host-2/0 host-2/1"
    killed = "worker 0 on host-1/0 was killed by SIGKILL (Killed)"
    history = (
        *HISTORY[:2],
        TracedItem(item(3, "allocation", 20.25, three, killed, 7, Loss(reason=killed)), SECOND),
        TracedItem(item(4, "allocation", 22.0, FIVE, "all it can use", iteration=40), SECOND),
    )
    traces = Traces()
    later = span(4, "iteration", begin=22.1, end=22.2, trace=SECOND, iteration=40)
    attack = span(5, "attack", begin=20.1, end=20.1, trace=SECOND, attack="kill worker job-1/0")
    traces.add(message(*LOSS, later, attack))
    _, loss = changes_of("job-1", "digits", history, traces)
    assert (loss.kind, loss.items, loss.seconds) == ("recovery", (3, 4), 0.25)
    assert loss.summary == (
        'digits lost a worker at 1970-01-01T00:00:20.120Z by the attack "kill worker job-1/0", 0.12 s into iteration 7 '
        "(worker 0 on host-1/0 was killed by SIGKILL (Killed)); training went on after 0.13 s and lost 0.25 s in all; "
        "replacements joined at 1970-01-01T00:00:22.000Z."
    )


def test_a_job_that_lost_all_its_workers_recovers_from_a_checkpoint() -> None:
    lost = Loss(reason="worker 1 on host-1/0 was killed", restart="from the checkpoint of iteration 5")
    reason = f"{lost.reason}: no worker is left, so it starts again {lost.restart}"
    history = (
        *HISTORY[:2],
        TracedItem(item(3, "queued", 20.0, "", reason, 5, lost), SECOND),
        TracedItem(item(4, "allocation", 20.5, FIVE, "start again", iteration=5), SECOND),
    )
    traces = Traces()
    traces.add(message(span(3, "iteration", begin=20.6, end=20.7, trace=SECOND, iteration=5)))
    _, loss = changes_of("job-1", "digits", history, traces)
    assert (loss.kind, loss.seconds) == ("recovery", 0.6)
    assert loss.summary == (
        "digits lost all its 5 workers at 1970-01-01T00:00:20.000Z (worker 1 on host-1/0 was killed); it started "
        "again from the checkpoint of iteration 5; training went on after 0.60 s."
    )


def test_a_loss_is_known_from_the_history_alone_and_not_from_its_words() -> None:
    """Traces are kept for a while only; what a reason says is for people."""
    _, loss, _ = changes_of("job-1", "digits", HISTORY, Traces())
    assert (loss.kind, loss.has_spans) == ("recovery", False)
    assert loss.summary.startswith("host-2 was lost at ")
    words = (*HISTORY[:2], TracedItem(item(3, "allocation", 20.25, "host-1/0", "host-2 lost", 7), SECOND))
    assert [change.kind for change in changes_of("job-1", "digits", words, Traces())] == ["start", "resize"]


def test_a_short_switch_is_told_in_milliseconds() -> None:
    traces = Traces()
    traces.add(message(span(1, "switch generation", begin=25.0, end=25.004, trace="3" * 32)))
    *_, growth = changes_of("job-1", "digits", HISTORY, traces)
    assert growth.summary.endswith("(fair share); the switch took 4 ms.")


def test_changes_are_told_without_any_spans_or_trace() -> None:
    history = [
        *(TracedItem(traced.item) for traced in HISTORY),
        TracedItem(item(5, "pausing", 30.0, FIVE, "requested", iteration=60)),
        TracedItem(item(6, "priority", 31.0, FIVE, "raised from 1 to 2")),
        TracedItem(item(7, "stopped", 32.0, "", "requested")),
    ]
    changes = changes_of("job-1", "digits", history, Traces())
    assert [change.kind for change in changes] == ["start", "start", "recovery", "resize", "pause", "other", "end"]
    assert all(change.trace is None and change.seconds is None and change.summary for change in changes)
    assert changes_of("job-1", "digits", [], Traces()) == ()


def test_checkpoints_are_changes_as_long_as_they_are_remembered() -> None:
    traces = Traces()
    traces.add(message(span(1, "checkpoint", begin=5.0, end=5.5, iteration=40)))
    traces.add(message(span(2, "checkpoint", begin=6.0, end=6.5, trace=SECOND, job="job-2")))
    (change,) = changes_of("job-1", "digits", [], traces)
    assert (change.kind, change.trace, change.seconds, change.number) == ("checkpoint", FIRST, 0.5, None)
    assert "iteration 40" in change.summary


def test_traces_are_bounded_in_number_and_in_size() -> None:
    traces = Traces()
    for number in range(kept.MAX_TRACES + 10):
        traces.add(message(span(1, begin=1.0, end=2.0, trace=f"{number:032x}")))
    assert traces.get(f"{9:032x}") is None
    assert traces.get(f"{10:032x}") is not None
    for number in range(kept.MAX_SPANS + 5):
        traces.add(message(span(number, begin=1.0, end=2.0)))
    view = traces.view(FIRST)
    assert view is not None
    assert (len(view.spans), view.dropped) == (kept.MAX_SPANS, 5)


def test_a_large_trace_displaces_the_one_that_nothing_was_added_to_for_longest() -> None:
    traces = Traces()
    traces.add(message(span(1, begin=1.0, end=2.0)))
    text = "x" * 500
    values = {f"value{number}": text for number in range(20)}
    for number in range(kept.MAX_BYTES // 10_000 + 1):
        trace = f"{number % 7 + 10:032x}"
        traces.add(message(span(number, begin=1.0, end=2.0, trace=trace, **values)))
    assert traces.get(FIRST) is None


def test_what_happened_within_steps_counts_for_the_size_of_a_trace() -> None:
    traces = Traces()
    traces.add(message(span(1, begin=1.0, end=2.0)))
    values = {f"value{number}": "x" * 500 for number in range(MAX_ATTRIBUTES)}
    events = (SpanEvent(name="exception", time=1, attributes=values),) * MAX_SPAN_EVENTS
    num_bytes = MAX_SPAN_EVENTS * MAX_ATTRIBUTES * 500
    for number in range(kept.MAX_BYTES // num_bytes + 1):
        step = span(number, begin=1.0, end=2.0, trace=f"{number % 7 + 10:032x}")
        traces.add(message(step.model_copy(update={"events": events})))
    assert traces.get(FIRST) is None


def test_a_step_whose_parent_is_not_known_is_a_first_one() -> None:
    traces = Traces()
    traces.add(message(span(2, begin=1.0, end=2.0, parent=1), span(3, begin=0.5, end=2.0, parent=2)))
    traces.add(message(span(2, begin=1.0, end=2.0, parent=1)))
    view = traces.view(FIRST)
    assert view is not None
    assert [(step.id[-1], step.parent and step.parent[-1]) for step in view.spans] == [("3", "2"), ("2", None)]


async def test_a_change_has_a_link_to_where_a_collector_shows_it(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start("--trace-url", "http://127.0.0.1:16686/trace/{trace}")
    set_up_tracing("test")
    with traced("cause") as cause:
        await store(scene, job("job-1"), items((0, "accepted", 0, ""), (1, "allocation", 2, "start")))
    trace = f"{cause.get_span_context().trace_id:032x}"
    (change,) = (await monitor.get("/v1/jobs/job-1/changes", ChangeList)).changes
    assert change.url == f"http://127.0.0.1:16686/trace/{trace}"


@pytest.mark.parametrize("url", ["http://127.0.0.1:16686", "javascript:alert({trace})", "{trace}"])
def test_a_link_without_a_place_for_the_trace_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match=r"must begin with http:// or https://, and contain \{trace\}"):
        MonitorSettings.model_validate({"credentials": "x", "storage": "file:///x", "trace_url": url})


async def test_a_monitor_keeps_what_services_send(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    set_up_tracing("test")
    with traced("cause") as cause:
        await store(scene, job("job-1"), items((0, "accepted", 0, ""), (1, "allocation", 2, "start")))
    trace = f"{cause.get_span_context().trace_id:032x}"
    changes = (await monitor.get("/v1/jobs/job-1/changes", ChangeList)).changes
    assert [(change.kind, change.trace, change.has_spans) for change in changes] == [("start", trace, False)]
    problem = await monitor.problem("GET", f"/v1/traces/{trace}")
    assert (problem.status, problem.code) == (404, "unknown")
    assert "docs/traces.md" in problem.detail

    sent = message(span(1, "iteration", begin=1.0, end=2.0, trace=trace, iteration=0))
    assert await scene.learner.send(subjects.trace("learner"), sent)
    await monitor.answers(f"/v1/traces/{trace}", 200)
    assert (await monitor.get("/v1/jobs/job-1/changes", ChangeList)).changes[0].has_spans
    view = await monitor.get(f"/v1/traces/{trace}", TraceView)
    assert [(step.name, step.service, step.begin, step.seconds) for step in view.spans] == [
        ("iteration", "learner", 1.0, 1.0)
    ]
    assert (await monitor.problem("GET", "/v1/traces/none")).code == "unknown"

    attack = {"attack": "kill worker job-1/3", "job": "job-1", "begin": 0.5}
    assert (await monitor.post(f"/v1/traces/{trace}/attacks", attack))[0] == 200
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(view.spans) < 2:
            view = await monitor.get(f"/v1/traces/{trace}", TraceView)
    step = view.spans[0]
    assert (step.name, step.begin, step.parent, step.attributes["resile.attack"]) == (
        *("attack", 0.5, None),
        "kill worker job-1/3",
    )
    assert step.links == (trace,)
    assert (await monitor.problem("POST", "/v1/traces/none/attacks", json=attack)).code == "unknown"
    early = {**attack, "begin": -1}
    assert (await monitor.problem("POST", f"/v1/traces/{trace}/attacks", json=early)).code == "invalid"
    assert (await monitor.problem("GET", "/v1/jobs/none/changes")).code == "unknown"
