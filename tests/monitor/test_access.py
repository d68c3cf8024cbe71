"""Who may come in, and what everybody else is told."""

import asyncio
import gzip
from pathlib import Path

import aiohttp
import pytest

from resile_monitor.api.application import application, serving
from resile_monitor.api.pool import Pool as MonitoredPool
from resile_monitor.history.curve_store import CurveStore
from resile_monitor.history.slot_store import SlotStore
from resile_monitor.projection import Projection
from resile_monitor.settings import MonitorSettings
from resile_shared.errors import UsageError
from resile_shared.http.api import JobList
from resile_shared.settings import load
from resile_shared.storage.objects import ObjectStorage
from resile_testing.fixtures import Pool

from .examples import SPEC, job
from .monitors import TOKEN, Monitors, Scene

BODY = SPEC.model_dump(mode="json")

PRIORITY_FAULT = "invalid request body: priority must be an integer from 1 to 1000000"


async def test_nobody_comes_in_without_the_token(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    async with aiohttp.ClientSession(monitor.url) as stranger:
        for path in ("/v1/jobs", "/v1/nothing", "/v1/events?follow=1"):
            for given in (None, "Bearer wrong", f"Basic {TOKEN}", TOKEN, "Bearer \xe9"):
                async with stranger.get(path, headers={"Authorization": given} if given else {}) as answer:
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
                    assert (await answer.json())["code"] == "unauthorized"
        for path in ("/", "/healthz", "/readyz"):
            async with stranger.get(path) as answer:
                assert answer.status == 200


async def test_without_a_token_only_this_machine_comes_in_and_no_page_of_another_site(
    monitors: Monitors, scene: Scene
) -> None:
    monitor = await monitors.start(token="")

    async def status(**headers: str) -> int:
        async with monitor.http.get("/v1/jobs", headers=headers) as answer:
            return answer.status

    assert await status() == 200
    assert await status(Origin=monitor.url) == 200
    assert await status(Origin="https://elsewhere.example") == 401
    assert await status(Host="elsewhere.example") == 401


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--api-host", "0.0.0.0"), "--api-host 0.0.0.0 opens the API to other machines"),
        (("--api-port", "70000"), "--api-port or RESILE_API_PORT"),
    ],
)
def test_a_monitor_that_would_be_open_to_all_does_not_start(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load(MonitorSettings, program="m", arguments=("--credentials", "x", "--storage", "file:///x", *flags))


def test_a_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    settings = MonitorSettings(credentials=file, storage="file:///x", api_host="0.0.0.0", token_file=file)
    for content in (None, "", "short"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(UsageError, match="--token-file"):
            settings.read_token()
    file.write_text(f"{TOKEN}\n")
    assert settings.read_token() == TOKEN


async def test_every_bad_request_gets_a_problem_document(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    for method, path, body, status, words in (
        ("GET", "/v1/nothing", None, 404, "unknown path /v1/nothing"),
        ("GET", "/v1/jobs/none", None, 404, "there is no job none"),
        ("GET", "/v1/jobs/no.job", None, 404, "there is no job no.job"),
        ("GET", "/v1/jobs/none/logs", None, 404, "there is no job none"),
        ("GET", "/v1/hosts/none", None, 404, "there is no host none"),
        ("GET", "/v1/events?job=none", None, 404, "there is no job none"),
        ("POST", "/v1/jobs/none/stop", b"", 404, "there is no job none"),
        ("POST", "/v1/hosts/none/drain", b"", 404, "there is no host none"),
        ("POST", "/v1/hosts/none/undrain", b"", 404, "there is no host none"),
        ("GET", "/v1/jobs/job-1/model", None, 404, "it is running, and its training has not ended"),
        ("GET", "/v1/jobs/job-1/output", None, 404, "RESILE_OUTPUT_DIR"),
        ("PUT", "/v1/jobs", b"{}", 405, "use GET, HEAD, POST"),
        ("DELETE", "/v1/jobs", None, 405, "use GET, HEAD, POST"),
        ("DELETE", "/v1/jobs/none", None, 404, "there is no job none"),
        ("POST", "/v1/jobs", b"{", 400, "invalid request body: must be JSON"),
        ("POST", "/v1/jobs", b"\xff", 400, "invalid request body: must be JSON"),
        ("POST", "/v1/jobs", b"", 422, "name is missing"),
        ("POST", "/v1/jobs", b"[]", 422, "invalid request body: must be an object"),
        ("POST", "/v1/jobs", b'{"a": "' + b"x" * (1 << 20) + b'"}', 413, "too large"),
        ("POST", "/v1/jobs/job-1/priority", b'{"priority": 0}', 422, PRIORITY_FAULT),
        ("POST", "/v1/jobs/job-1/priority", b'{"priority": 5, "prority": 5}', 422, "prority is unknown"),
        ("POST", "/v1/jobs/job-1/pause", b'{"x": 1}', 422, "x is unknown"),
        ("GET", "/v1/events?tail=-1", None, 422, "tail must be an integer from 0 to 10000"),
        ("GET", "/v1/events?tial=1", None, 422, "tial is unknown"),
        ("GET", "/v1/jobs/job-1/logs?follow=maybe", None, 422, "follow must be a valid boolean"),
        ("POST", "/v1/packages", b"", 422, "packed as tar.gz"),
        ("POST", "/v1/packages", b"no archive", 422, "packed as tar.gz"),
        ("POST", "/v1/packages", gzip.compress(b"no tar"), 422, "packed as tar.gz"),
    ):
        problem = await monitor.problem(method, path, data=body)
        assert (problem.status, words in problem.detail) == (status, True), problem
    problem = await monitor.problem("GET", "/v1/events?follow=1", headers={"Last-Event-ID": "logs:3"})
    assert (problem.status, problem.code) == (400, "malformed")
    too_small = BODY | {"min_workers": 9, "max_workers": 8}
    assert "lower one or raise the other" in (await monitor.problem("POST", "/v1/jobs", json=too_small)).detail
    assert (await monitor.get("/v1/jobs", JobList)).jobs[0].id == "job-1"


async def test_a_monitor_without_its_bus_is_alive_and_not_ready(monitors: Monitors, pool: Pool, scene: Scene) -> None:
    monitor = await monitors.start()
    await pool.kill()
    await monitor.answers("/readyz", 503)
    await monitor.answers("/healthz", 200)


async def test_a_monitor_that_has_not_read_everything_shows_nothing(scene: Scene, pool: Pool, tmp_path: Path) -> None:
    bus = await pool.bus("monitor")
    projection = Projection()
    storage = ObjectStorage(tmp_path.as_uri())
    young = MonitoredPool(
        bus, storage, projection, CurveStore(bus, projection), SlotStore(bus, projection), max_package_bytes=1
    )
    async with (
        serving(application(young, token=None), host="127.0.0.1", port=0) as url,
        aiohttp.ClientSession(url) as http,
    ):
        for path, status in (("/v1/jobs", 503), ("/readyz", 503), ("/healthz", 200)):
            async with http.get(path) as answer:
                assert answer.status == status
        young.has_caught_up = True
        for path in ("/v1/jobs", "/readyz"):
            async with http.get(path) as answer:
                assert answer.status == 200


async def test_a_monitor_that_cannot_start_says_why_in_one_line(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    port = monitor.url.rpartition(":")[2]
    for flags, status, reason in (
        (("--api-port", port), 2, "cannot listen on"),
        (("--storage", "nonsense"), 2, "is not a URL of storage"),
        (("--token-file", "/nowhere"), 2, "--token-file: /nowhere cannot be read"),
        (("--api-host", "::"), 2, "opens the API to other machines"),
    ):
        process = await monitors.process(*flags, stderr=asyncio.subprocess.PIPE)
        _, err = await process.communicate()
        assert process.returncode == status
        assert reason in err.decode().splitlines()[-1]
        assert b"Traceback" not in err
