"""What a request leads to is one trace, through all services of a real pool."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resile_testing.collector import Collector, Span, collecting
from resile_testing.waiting import PATIENCE_SECONDS

from .conftest import TRAIN
from .pools import UpPool, pool_up

EXAMPLES = Path(__file__).parents[2] / "examples"
SLOWLY = ("--pause", 0.05, "--epochs", 10_000, "--shards", 12)


def test_a_change_of_priority_is_one_trace_from_the_request_to_the_last_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with collecting() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 4) as pool:
            one, two = [pool.submit(script, "--name", name, "--max-workers", 3, "--", *SLOWLY) for name in "ab"]
            for job in (one, two):
                pool.becomes(job, lambda job: job["workers"] == 2)
            assert pool.run("priority", one, 20_000).status == 0
            pool.becomes(one, lambda job: job["workers"] == 3)
            for job in (one, two):
                assert pool.run("stop", job).status == 0
    (trace,) = collector.started_by("POST /v1/jobs/{job}/priority")
    spans = {(span.name, span.attributes.get("job")) for span in trace}
    assert {
        ("decide upon JobPriority", one),
        ("carry out allocation", two),
        ("form generation", two),
        ("worker is gone", two),
        ("carry out allocation", one),
        ("start worker", one),
        ("prepare worker", one),
        ("run script to training call", one),
        ("form generation", one),
        ("publish resile.report.{job}.switched", one),
    } <= spans


@pytest.mark.long
def test_every_change_of_a_job_is_one_trace_without_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with collecting() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 2, "--open-to-chaos") as pool:
            job = pool.submit(script, "--name", "a", "--max-workers", 3, "--", *SLOWLY, "--every", 20)
            allocated = "publish resile.job.{job}.allocation"
            start = change(collector, "POST /v1/jobs", "form generation", "exchange", allocated)
            until(lambda: hosts_with(start, "iteration") == {"host-1", "host-2"})
            stored = "decide upon report: checkpoint"
            checkpoint = change(collector, "checkpoint", "copy state", "store parts", "write manifest", stored)

            attacked = pool.ask("chaos", "kill", "worker", job)
            recovery = change(collector, "recover", "synchronize state", "iteration", allocated)
            (attack,) = change(collector, "attack")
            assert attack.attributes["attack"] == f"kill {attacked['target']}"
            assert collector.traces[bytes.fromhex(str(attack.attributes["change"]))] == recovery
            assert attack.begin < min(span.begin for span in recovery if span.name == "recover")
            until(
                lambda: shows_attack(pool, job, attacked["traces"][job], f'by the attack "kill {attacked["target"]}"')
            )
            until(lambda: {span.name for span in recovery if not span.parent} <= {"worker suspected", "worker is gone"})
            pool.becomes(job, lambda view: view["workers"] == 3)

            other = pool.submit(script, "--name", "b", "--max-workers", 2, "--", *SLOWLY)
            resize = change(collector, "POST /v1/jobs", "switch generation", allocated)
            until(lambda: {span.attributes.get("job") for span in resize if span.name == "iteration"} == {job, other})

            assert pool.run("pause", job).status == 0
            paused = "publish resile.job.{job}.paused"
            pause = change(collector, "POST /v1/jobs/{job}/pause", "checkpoint", "worker is gone", paused)
            assert pool.run("resume", job).status == 0
            resume = change(collector, "POST /v1/jobs/{job}/resume", "load checkpoint", allocated)

            until(lambda: not orphans(recovery))  # the agents of several hosts begin it
            for spans in (start, checkpoint, resize, pause, resume):
                until(lambda spans=spans: not orphans(spans) and sum(not span.parent for span in spans) == 1)
            until(lambda: kinds(pool, job) >= {"start", "resize", "recovery", "pause", "checkpoint"})
            shown = pool.ask("trace", job, "2")["trace"]["spans"]
            assert {span["name"] for span in shown} >= {"POST /v1/jobs", "iteration"}
            for each in (job, other):
                assert pool.run("stop", each).status == 0
    names = {span.name for spans in collector.traces.values() for span in spans}
    assert not [name for name in names if re.search(r"(job|host)-\d|[0-9a-f]{16}", name)], "ids are attributes"
    assert early(collector) == []
    before = [span for spans in collector.traces.values() for span in spans if span.attributes.get("change")]
    assert {"attack", "iteration"} <= {span.name for span in before} <= {"attack", "iteration", "exchange"}
    for span in [span for span in before if span.name == "iteration"]:
        of_change = collector.traces[bytes.fromhex(str(span.attributes["change"]))]
        orders = [other for other in of_change if other.name == "form generation"]
        assert span.begin < min(o.begin for o in orders if o.attributes["host"] == span.attributes["host"])


CLOCK = """
import os, sys, time
if "host-2" in sys.argv or "BEHIND" in os.environ:
    os.environ["BEHIND"] = "yes"
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() - 2.0, lambda: real_ns() - 2 * 10**9
"""


@pytest.mark.long
def test_no_span_begins_before_its_parent_though_the_clock_of_a_host_is_two_seconds_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "clock"))
    with collecting() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with pool_up(tmp_path / "home", "--hosts", 2, "--slots", 1, "--open-to-chaos") as pool:
            job = pool.submit(script, "--name", "a", "--max-workers", 2, "--", *SLOWLY)
            start = change(collector, "POST /v1/jobs", "form generation", "exchange")
            until(lambda: hosts_with(start, "iteration") == {"host-1", "host-2"})
            pool.ask("chaos", "kill", "worker", job)
            change(collector, "recover", "iteration", "publish resile.job.{job}.allocation")
            pool.becomes(job, lambda view: view["workers"] == 2)
            assert pool.run("pause", job).status == 0
            change(collector, "POST /v1/jobs/{job}/pause", "checkpoint", "worker is gone")
    begun = {host: min(span.begin for span in start if span.attributes.get("host") == host) for host in HOSTS}
    assert abs(begun["host-2"] - begun["host-1"]) < 1.5, "the clock is corrected, not each span alone"
    assert early(collector) == []


HOSTS = ("host-1", "host-2")


def early(collector: Collector) -> list[tuple[str, str, float]]:
    """The spans that begin before their parents: name, name of the parent, seconds."""
    found = []
    for spans in list(collector.traces.values()):
        known = {span.id: span for span in list(spans)}
        children = [(span, known[span.parent]) for span in list(spans) if span.parent in known]
        found += [(span.name, parent.name, span.begin - parent.begin) for span, parent in children]
    return [each for each in found if each[2] < 0]


TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_the_trace_of_a_caller_goes_on_through_the_pool_into_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the caller, like a CI system, does not record it itself."""
    with collecting() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with pool_up(tmp_path / "home", "--hosts", 1, "--slots", 2) as pool:
            monkeypatch.setenv("TRACEPARENT", f"00-{TRACE}-{CALLER}-00")
            job = pool.submit(EXAMPLES / "own_spans.py", "--name", "spans", "--max-workers", 2)
            pool.completed(job)
            until(lambda: "epoch" in {span.name for span in list(collector.traces[bytes.fromhex(TRACE)])})
            assert pool.ask("trace", job, "1")["change"]["trace"] == TRACE
    spans = collector.traces[bytes.fromhex(TRACE)]
    assert {span.parent.hex() for span in spans if span.name == "POST /v1/jobs"} == {CALLER}
    preparations = {span.id for span in spans if span.name == "prepare worker"}
    epochs = [span for span in spans if span.name == "epoch"]
    assert {span.service for span in epochs} == {"spans"}
    assert {span.parent for span in epochs} <= preparations
    assert {span.resource["job"] for span in epochs} == {job}
    assert {span.resource["host"] for span in epochs} == {"host-1"}


def shows_attack(pool: UpPool, job: str, trace: str, words: str) -> bool:
    """Whether the monitor, which gets spans some time later, has the attack in a trace and ``words`` in its summary."""
    ended = pool.run("trace", job, trace, "--json")
    if ended.status != 0:
        return False
    names = {span["name"] for span in ended.json["trace"]["spans"]}
    return "attack" in names and words in ended.json["change"]["summary"]


def change(collector: Collector, *names: str) -> list[Span]:
    """Wait until a trace has spans of all these names; return its spans, which may become more."""

    def found() -> list[list[Span]]:
        traces = list(collector.traces.values())
        return [spans for spans in traces if set(names) <= {span.name for span in list(spans)}]

    until(lambda: bool(found()))
    return found()[0]


def until(condition: Callable[[], bool]) -> None:
    """Wait for what services export, and what other processes do."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


def orphans(spans: list[Span]) -> list[Span]:
    """The spans whose parents did not arrive."""
    known = {span.id for span in list(spans)}
    return [span for span in list(spans) if span.parent and span.parent not in known]


def kinds(pool: UpPool, job: str) -> set[str]:
    """The kinds of changes of a job that the monitor knows."""
    return {change["kind"] for change in pool.ask("trace", job)["changes"]}


def hosts_with(spans: list[Span], name: str) -> set[str | int]:
    """The hosts on which a step of that name happened."""
    return {span.attributes["host"] for span in spans if span.name == name}
