import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resile_shared.bus import subjects
from resile_shared.bus.catalogue import model_of
from resile_shared.bus.envelope import Malformed
from resile_shared.bus.subjects import STREAMS, InvalidSubject, Subject
from resile_shared.messages.commands import JobStop
from resile_shared.messages.hosts import HostHello
from resile_shared.messages.jobs import JobEvent
from resile_shared.messages.reports import Content

ids = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)


@given(ids, ids)
def test_what_is_built_is_parsed(name: str, what: str) -> None:
    assert subjects.parse(subjects.job_event(name, what)) == Subject("job", name, what)
    assert subjects.parse(subjects.host_event(name, what)) == Subject("host", name, what)
    assert subjects.parse(subjects.report(name, what)) == Subject("report", name, what)
    assert subjects.parse(subjects.command(name, what)) == Subject("command", name, what)
    assert subjects.parse(subjects.heartbeat(name)) == Subject("heartbeat", name)
    assert subjects.parse(subjects.log(name)) == Subject("log", name)


@given(st.text(max_size=70).filter(lambda text: not subjects._TOKEN.fullmatch(text)))
def test_an_id_cannot_change_the_shape_of_a_subject(name: str) -> None:
    with pytest.raises(InvalidSubject):
        subjects.heartbeat(name)
    with pytest.raises(InvalidSubject):
        subjects.JOBS.subject(name)


@given(st.text(max_size=60) | st.lists(ids, max_size=5).map(lambda tokens: ".".join(["resile", *tokens])))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(Malformed):
        model_of(text)


def test_each_subject_has_its_model() -> None:
    assert model_of("resile.command.job.stop") is JobStop
    assert model_of("resile.host.host-1.hello") is HostHello
    assert model_of("resile.job.job-1.allocation") is JobEvent
    for unknown in ("resile.command.job.explode", "resile.host.host-1.exploded", "resile.job", "other.job.a.b"):
        with pytest.raises(Malformed):
            model_of(unknown)


def test_each_report_is_stored_in_one_stream_and_progress_apart_from_facts() -> None:
    kinds = {content.model_fields["kind"].default for content in get_args(get_args(Content)[0])}
    stored = {
        kind: [stream for stream in STREAMS if subjects.reports_of_kind(kind) in stream.subjects] for kind in kinds
    }
    assert stored.pop("peer_suspected") == [], "it is repeated instead"
    assert stored.pop("progress") == [subjects.PROGRESS], "much of it displaces nothing else"
    assert set(stored) == set(subjects.FACTS)
    assert all(streams == [subjects.REPORTS] for streams in stored.values())


@pytest.mark.parametrize(
    ("subject", "template", "ids"),
    [
        ("resile.report.job-1.ready", "resile.report.{job}.ready", {"job": "job-1"}),
        ("resile.host.host-1.lost", "resile.host.{host}.lost", {"host": "host-1"}),
        ("resile.instruction.host-1", "resile.instruction.{host}", {"host": "host-1"}),
        ("resile.command.job.pause", "resile.command.job.pause", {}),
        ("resile.deadletter", "resile.deadletter", {}),
        ("_INBOX_monitor.abc.def", "_INBOX", {}),
    ],
)
def test_the_template_of_a_subject_has_no_ids(subject: str, template: str, ids: dict[str, str]) -> None:
    assert subjects.template_of(subject) == (template, ids)
