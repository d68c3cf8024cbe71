"""Datasets over HTTP: registered as they are, compared with their source, and removed."""

from pathlib import Path

from resile_shared.api import DatasetList, Empty
from resile_shared.messages.datasets import Dataset
from resile_shared.storage import ObjectStorage

from .monitors import Monitors, Scene


async def test_a_dataset_is_registered_compared_with_its_source_and_removed(
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
    problem = await monitor.problem("GET", "/v1/datasets/few")
    assert (problem.status, "2 files of 11 bytes instead of 1 files of 5 bytes" in problem.detail) == (409, True)
    assert (await add("few")).num_files == 2
    async with monitor.http.delete("/v1/datasets/few") as answer:
        assert Empty.model_validate_json(await answer.read()) == Empty()
    assert (await monitor.get("/v1/datasets", DatasetList)).datasets == (other,)
    assert (await monitor.problem("DELETE", "/v1/datasets/few")).status == 404


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
