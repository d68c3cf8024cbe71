"""The clients for programs: one set of requests, with and without asyncio."""

import inspect
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.sdk.trace import TracerProvider

from resile import AsyncClient, Client, http_requests
from resile.cli import jobs, main
from resile.http_requests import Unreachable, callers_trace
from resile.job import JobNotCompleted
from resile.job_options import JobOptions
from resile.svg_chart import Chart, Mark, Series, line_chart, stacked_chart
from resile.watching import MAX_POINTS, Watched
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.jobs import JobSpec, JobState

from .api_server import ApiServer, job_view

LOADED = """
import sys
import resile
assert "aiohttp" not in sys.modules and "resile.client" not in sys.modules
from resile import Client, AsyncClient, Server
assert "torch" not in sys.modules
"""


def public(kind: type) -> dict[str, inspect.Signature]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    return {name: inspect.signature(method) for name, method in methods if not name.startswith("_")}


def test_the_clients_are_loaded_when_they_are_used_and_torch_never() -> None:
    subprocess.run([sys.executable, "-c", LOADED], check=True)


def test_the_client_without_asyncio_has_every_request_of_the_other_one() -> None:
    here, there = public(Client), public(AsyncClient)
    assert set(there) <= set(here)
    for name, signature in there.items():
        assert list(here[name].parameters.values()) == list(signature.parameters.values()), name
        if name != "submit_script":  # it returns the job, to go on with
            expected = str(signature.return_annotation).replace("AsyncIterator", "Iterator")
            assert str(here[name].return_annotation) == expected, name


def test_a_program_without_asyncio_asks_and_follows(api_server: ApiServer) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED)
    with Client() as client:
        assert [job.id for job in client.jobs()] == ["digits-1"]
        assert client.get_job("digits").id == "digits-1"
        followed = client.follow_logs("digits-1", tail=100)  # over a connection that breaks after two lines
        assert [next(followed).text for _ in range(4)] == [f"line {number}" for number in range(1, 5)]
        followed.close()  # type: ignore[attr-defined]
    with pytest.raises(ResileError, match="this client is closed"):
        client.jobs()
    client.close()


def test_what_is_wrong_with_a_job_is_said_before_the_upload(api_server: ApiServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with Client() as client, pytest.raises(UsageError, match="priority must be an integer from 1"):
        client.submit_script(script, priority=0)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        ({"gang": True}, "gang must be a number of workers from 1 to 10000"),
        ({"gang": 4, "max_workers": 4}, "gang 4: it always has 4 workers: leave out min_workers, max_workers"),
        ({"compat": "other"}, "compat: there is no interface other: use ibm-edt"),
        ({"env": {"PYTHONHASHSEED": "1"}}, "env: PYTHONHASHSEED cannot be set"),
        ({"deadline": datetime(2001, 1, 1)}, "deadline: 2001-01-01 00:00 has passed: give a later time"),
        ({"colour": "red"}, "colour is unknown"),
    ],
)
def test_options_that_no_job_can_have_are_refused_before_the_upload(
    options: Any, answer: str, api_server: ApiServer, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with Client() as client, pytest.raises(UsageError, match=answer):
        client.submit_script(script, **options)
    assert not api_server.packages


def test_a_gang_has_the_number_of_workers_that_it_is_given(api_server: ApiServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with Client() as client:
        client.submit_script(script, gang=4, compat="ibm-edt")
    _, spec = api_server.asked[-1]
    assert (spec.gang, spec.min_workers, spec.max_workers) == (True, 4, 4)
    assert spec.env == {"RESILE_COMPAT": "resile.integrations.ibm_edt"}


@pytest.mark.usefixtures("api_server")
def test_a_program_is_warned_of_files_that_are_not_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / ".env").touch()
    with Client() as client, pytest.warns(UserWarning, match=r"not sent: \.env \(hidden\): jobs get"):
        client.submit_script(tmp_path / "train.py")


def test_the_client_and_the_command_have_an_option_for_each_field_of_a_job() -> None:
    here = set(JobOptions.__annotations__)
    assert here - {"compat"} == JobSpec.model_fields.keys() - {"package", "script", "args"}
    parameters = set(inspect.signature(jobs.submit).parameters)
    assert here - parameters == {"service"}, "`resile serve` has it"
    assert parameters - here == {
        "path",
        "args",
        "packages",
        "server",
        "home",
        "as_json",
        "check",
        "dry_run",
        "idempotency_key",
    }


def test_each_flag_of_the_command_reaches_the_job(api_server: ApiServer, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    flags = "--name n --env A=b --compat ibm-edt --with einops --data few --mount /tmp --min-workers 2 --max-workers 4 "
    flags += "--sizes 2,4 --deadline 2h --priority 7 --tenant t --group gpu=a --placement spread"
    assert main(["submit", str(script), *flags.split(), "--", "--lr", "0.1"]) == 0
    assert main(["submit", str(script), "--gang", "3", "--restartable"]) == 0
    script.write_text("class Served: ...")
    assert main(["serve", f"{script}:Served", "--concurrency", "2"]) == 0
    specs = [spec for verb, spec in api_server.asked if verb == "submit"]
    for name, field in JobSpec.model_fields.items():
        default = field.get_default(call_default_factory=True)
        assert any(getattr(spec, name) != default for spec in specs), name


def test_a_job_names_its_packages_or_the_file_with_them(api_server: ApiServer, tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "requirements.txt"
    script.write_text("")
    file.write_text("Einops >= 0.8  # for the attention\n\ntiny-package==1.2\n")
    with Client() as client:
        client.submit_script(script, requirements=["tiny_package == 1.2", "einops>=0.8"])
        client.submit_script(script, requirements=file)
        for wrong, reason in [(["-r x"], "an option of pip"), ("a b", "'a b' is not a"), (tmp_path / "no", "read")]:
            with pytest.raises(UsageError, match=reason):
                client.submit_script(script, requirements=wrong)  # type: ignore[arg-type]
    submitted = [spec.requirements for kind, spec in api_server.asked if kind == "submit"]
    assert submitted == [("einops>=0.8", "tiny-package==1.2")] * 2
    assert len(api_server.packages) == 2, "what is wrong is said before the upload"


def test_registering_data_waits_while_the_pool_lists_it(api_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "_TIMEOUT", aiohttp.ClientTimeout(sock_read=0.1))
    monkeypatch.setattr(http_requests, "_RETRY_SECONDS", 0.0)
    api_server.listing_seconds = 1.0
    with Client() as client:
        assert client.add_dataset("few", "s3://bucket/few").uri == "s3://bucket/few"


def test_waiting_for_a_job_that_fails_raises_with_its_traceback(api_server: ApiServer) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.FAILED, reason="it broke", details="Traceback")
    with Client() as client, pytest.raises(JobNotCompleted, match="digits-1 failed: it broke") as caught:
        client.get_job("digits-1").wait()
    assert caught.value.view.details == "Traceback"


def test_waiting_for_a_job_survives_a_pool_that_does_not_answer_for_a_while(
    api_server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_requests, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr("resile.job.LOOK_SECONDS", 0.0)
    done = job_view("digits-1", state=JobState.COMPLETED)

    def go_away() -> None:
        api_server.num_lost_answers = 3

    with Client() as client:
        job = client.get_job("digits-1")
        api_server.before = [go_away, lambda: api_server.jobs.update({"digits-1": done})]
        assert job.wait().state is JobState.COMPLETED
        api_server.jobs["digits-1"] = job_view("digits-1")
        api_server.before = [go_away]
        monkeypatch.setattr("resile.job.PATIENCE_SECONDS", 0.0)
        with pytest.raises(Unreachable):
            job.wait()


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_trace_of_the_caller_goes_with_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callers_trace() == {}
    monkeypatch.setenv("TRACEPARENT", PARENT)
    monkeypatch.setenv("TRACESTATE", "ci=1")
    assert callers_trace() == {"traceparent": PARENT, "tracestate": "ci=1"}
    with TracerProvider().get_tracer("program").start_as_current_span("nightly training") as span:
        trace = callers_trace()["traceparent"].split("-")[1]
    assert trace == f"{span.get_span_context().trace_id:032x}", "the program's own span is nearer"
    monkeypatch.setenv("TRACEPARENT", "nonsense\n")
    assert callers_trace() == {}


def test_waiting_ends_after_the_time_that_is_given(api_server: ApiServer) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1")
    with Client() as client, pytest.raises(TimeoutError, match="digits-1 is running after 0 s"):
        client.get_job("digits-1").wait(timeout=0)


def test_outside_of_a_notebook_a_watch_prints_lines(api_server: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    api_server.jobs["digits-1"] = job_view("digits-1", state=JobState.COMPLETED, workers=0)
    with Client() as client:
        assert client.get_job("digits-1").watch().state is JobState.COMPLETED
    assert capsys.readouterr().out == "digits (digits-1): completed, 0 workers, iteration 50 of 120, loss 0.25\n"


def test_the_chart_of_a_watch_is_bounded_and_shows_text_as_text() -> None:
    watched = Watched()
    view = job_view("digits-1", name="<script>", details="<b>no</b>")
    for number in range(3 * MAX_POINTS):
        look = view.model_copy(update={"iteration": number, "workers": number % 7, "loss": 1 / (1 + number)})
        watched.add(look, seconds=float(number))
    watched.add(view.model_copy(update={"iteration": 10**6, "loss": float("nan")}), seconds=1e6)
    assert len(watched.slots) <= MAX_POINTS
    assert len(watched.losses) <= MAX_POINTS
    assert watched.losses[0] == (0, 1.0)
    html = watched.html(view)
    assert html.count("<svg") == 2
    assert "<script>" not in html
    assert "<b>no" not in html
    assert "nan" not in html


def test_charts_are_well_formed_whatever_they_show() -> None:
    chart = Chart("slots & <more>", "seconds", "slots", 0.0, 0.0, marks=(Mark(0.0, "<killed>"),))
    for series in ([], [Series("one", [])], [Series("<a>", [(0, 0)]), Series("b", [(0, 2), (3, 1)])]):
        for drawn in (line_chart(chart, series), stacked_chart(chart, series)):
            assert ElementTree.fromstring(drawn).attrib["aria-label"] == "slots & <more>"


def test_a_stacked_chart_names_each_value_once_for_its_stretch() -> None:
    chart = Chart("slots", "seconds", "slots", 30.0, 10.0)
    one = Series("one", [(0, 8), (10, 4), (20, 4)])
    two = Series("two", [(10, 4), (20, 3)])
    root = ElementTree.fromstring(stacked_chart(chart, [one, two]))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text") if text.attrib.get("fill") == "#fff"]
    assert texts == ["8", "4", "4", "3"]


@pytest.mark.parametrize(("num_broken", "is_delivered"), [(2, True), (3, False)])
async def test_a_download_that_breaks_off_is_begun_again_and_is_not_taken_for_a_pool_that_is_down(
    num_broken: int, is_delivered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_requests, "_PAUSE_SECONDS", 0.0)
    begun = 0

    async def send(request: web.Request) -> web.StreamResponse:
        nonlocal begun
        begun += 1
        response = web.StreamResponse()
        response.content_length = 8
        await response.prepare(request)
        await response.write(b"half")
        if begun <= num_broken:
            assert request.transport is not None
            request.transport.close()
        else:
            await response.write(b"rest")
        return response

    app = web.Application()
    app.add_routes([web.get("/v1/file", send)])
    async with TestServer(app) as server:
        requests = http_requests.HttpRequests(http_requests.Server(str(server.make_url("")).rstrip("/"), "token"))
        file = tmp_path / "file"
        try:
            if is_delivered:
                await requests.download("file", file)
                assert file.read_bytes() == b"halfrest"
            else:
                with pytest.raises(http_requests.TransferBroken, match="may have been replaced meanwhile"):
                    await requests.download("file", file)
        finally:
            await requests.close()
    assert list(tmp_path.iterdir()) == ([file] if is_delivered else [])
