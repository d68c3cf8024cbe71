"""Datasets over HTTP: registered as they are, returned as they were, and removed."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from resile_shared.http.api import DatasetList, Empty
from resile_shared.messages.datasets import Dataset
from resile_shared.storage.objects import ObjectStorage

from .monitors import Monitor, Monitors, Scene


async def test_a_dataset_is_registered_and_returned_as_it_was_until_it_is_added_again_or_removed(
    monitors: Monitors, scene: Scene, tmp_path: Path
) -> None:
    monitor = await monitors.start()
    source = tmp_path / "few"
    source.mkdir()
    (source / "one").write_text("first")
    body = f'{{"uri": "{source.as_uri()}"}}'

    async def add(name: str, text: str = body) -> Dataset:
        async with monitor.http.put(f"/v1/datasets/{name}", data=text) as answer:
            assert answer.status == 200, await answer.text()
            return Dataset.model_validate_json(await answer.read())

    added = await add("few")
    assert (added.name, added.uri, added.num_files, added.num_bytes) == ("few", source.as_uri(), 1, 5)
    other = await add("another")
    assert (await monitor.get("/v1/datasets", DatasetList)).datasets == (other, added)
    assert await monitor.get("/v1/datasets/few", Dataset) == added
    (source / "two").write_text("second")
    assert await monitor.get("/v1/datasets/few", Dataset) == added, "hosts compare it with its source"
    assert (await add("few")).num_files == 2
    async with monitor.http.delete("/v1/datasets/few") as answer:
        assert Empty.model_validate_json(await answer.read()) == Empty()
    assert (await monitor.get("/v1/datasets", DatasetList)).datasets == (other,)
    assert (await monitor.problem("DELETE", "/v1/datasets/few")).status == 404


async def test_removing_a_dataset_again_with_the_same_key_has_the_same_answer(
    monitors: Monitors, scene: Scene, tmp_path: Path
) -> None:
    """Also of another monitor. Nothing else has it: a name that is misspelled is unknown, with a key too."""
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one").write_text("first")
    monitor, other = await monitors.start(), await monitors.start()
    first, second = ({"Idempotency-Key": key} for key in ("one", "two"))
    for _ in range(2):
        async with monitor.http.put("/v1/datasets/few", json={"uri": (tmp_path / "few").as_uri()}) as answer:
            assert answer.status == 200
        for each in (monitor, other):
            async with each.http.delete("/v1/datasets/few", headers=first) as answer:
                assert (answer.status, await answer.json()) == (200, {})
        for headers in ({}, second):
            assert (await monitor.problem("DELETE", "/v1/datasets/few", headers=headers)).status == 404
        assert (await monitor.problem("DELETE", "/v1/datasets/fewer", headers=first)).status == 404
        assert (await monitor.get("/v1/datasets", DatasetList)).datasets == ()


async def test_what_cannot_be_a_dataset_is_refused_by_name(monitors: Monitors, scene: Scene, tmp_path: Path) -> None:
    monitor = await monitors.start()
    for name, uri, part in (
        ("few", (tmp_path / "none").as_uri(), "there is no"),
        ("few", "http://127.0.0.1:1/x", "use file://, s3://, gs://, az://, pool:"),
        ("few", "/etc", "use file://"),
        ("few", "pool:../etc", "name a folder of the pool's storage"),
        ("few", "pool:jobs/none", "there are no files"),
        ("Few", tmp_path.as_uri(), "lower-case letters, digits and -"),
    ):
        problem = await monitor.problem("PUT", f"/v1/datasets/{name}", data=f'{{"uri": "{uri}"}}')
        assert (problem.status, part in problem.detail) == (422, True), problem.detail
    assert (await monitor.problem("GET", "/v1/datasets/..%2f..%2fprobe")).status in (404, 422)
    assert (await monitor.problem("GET", "/v1/datasets/few")).status == 404


async def test_a_folder_of_the_pool_is_a_dataset(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    ObjectStorage(monitors.storage.url).put("jobs/job-1/output/x", [b"123"])
    async with monitor.http.put("/v1/datasets/made", data='{"uri": "pool:jobs/job-1/output"}') as answer:
        assert Dataset.model_validate_json(await answer.read()).num_bytes == 3


async def test_other_objects_beside_the_datasets_are_none(monitors: Monitors, scene: Scene, tmp_path: Path) -> None:
    monitor = await monitors.start()
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one").write_text("first")
    storage = ObjectStorage(monitors.storage.url)
    for key in ("mnist/labels.csv", "mnist/few.json", "Upper.json", "few.csv", ".json", "few"):
        storage.put(f"datasets/{key}", [b"1,2"])
    assert (await monitor.get("/v1/datasets", DatasetList)).datasets == ()
    async with monitor.http.put("/v1/datasets/few", json={"uri": (tmp_path / "few").as_uri()}) as answer:
        assert answer.status == 200
    assert [each.name for each in (await monitor.get("/v1/datasets", DatasetList)).datasets] == ["few"]


async def test_a_damaged_dataset_is_named_and_can_be_removed(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    ObjectStorage(monitors.storage.url).put("datasets/few.json", [b"{"])
    for path in ("/v1/datasets", "/v1/datasets/few"):
        problem = await monitor.problem("GET", path)
        assert (problem.status, "dataset few cannot be read: add it again, or remove" in problem.detail) == (409, True)
    async with monitor.http.delete("/v1/datasets/few") as answer:
        assert answer.status == 200
    assert (await monitor.get("/v1/datasets", DatasetList)).datasets == ()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What sources of s3:// are read from: it accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1")):
            monkeypatch.setenv(f"AWS_{name}", value)
        yield server


@asynccontextmanager
async def adding(monitor: Monitor, silent: socket.socket, num: int) -> AsyncIterator[None]:
    """Add datasets from sources that do not answer; the first one is being listed."""

    async def add(name: str) -> None:
        with suppress(aiohttp.ClientError):
            async with monitor.http.put(f"/v1/datasets/{name}", json={"uri": "s3://bucket/few"}):
                pass

    tasks = [asyncio.create_task(add(f"few-{number}")) for number in range(num)]
    try:
        await asyncio.to_thread(silent.accept)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_sources_that_do_not_answer_keep_no_other_request_waiting(
    monitors: Monitors, scene: Scene, silent: socket.socket
) -> None:
    """Each of these listings keeps a thread for long, and there are more of them than of any pool's threads."""
    monitor = await monitors.start()
    async with adding(monitor, silent, 40):
        for _ in range(40):
            assert (await monitor.get("/v1/datasets", DatasetList)).datasets == ()


async def test_sources_that_do_not_answer_are_given_up_by_name_and_others_listed(
    monitors: Monitors, scene: Scene, silent: socket.socket, tmp_path: Path
) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one").write_text("first")
    monitor = await monitors.start("--source-seconds", "1")
    async with adding(monitor, silent, 40):
        async with monitor.http.put("/v1/datasets/few", json={"uri": (tmp_path / "few").as_uri()}) as answer:
            assert answer.status == 200
        problem = await monitor.problem("PUT", "/v1/datasets/other", json={"uri": "s3://bucket/few"})
    assert (problem.status, problem.code) == (422, "invalid")
    assert problem.detail.startswith("cannot read few in s3://bucket: the storage cannot be reached"), problem.detail


async def test_sources_that_do_not_answer_do_not_keep_a_monitor_from_stopping(
    monitors: Monitors, scene: Scene, silent: socket.socket
) -> None:
    monitor = await monitors.start()
    async with adding(monitor, silent, 8):
        monitor.process.terminate()
        assert await monitor.process.wait() == 0
