"""Datasets: fetched once to a host, whole or not at all, as they were registered, and kept while there is room."""

import asyncio
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from resile.chaos.s3_server import S3Server
from resile_learner.agent.job_datasets import JobDatasets
from resile_learner.datasets import download as dataset_download
from resile_learner.datasets import host_datasets as module
from resile_learner.datasets.cache import SPARE_BYTES, DataFailed
from resile_learner.datasets.host_datasets import HostDatasets
from resile_shared.messages.datasets import Dataset
from resile_shared.storage.dataset_sources import Listing, SourceUnusable, list_source, source_uri
from resile_shared.storage.objects import ObjectStorage, ObjectVersion, StorageError
from resile_testing.fixtures import s3
from resile_testing.waiting import until

from .dataset_host import Host

__all__ = ["s3"]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


async def test_a_folder_is_fetched_once_with_its_progress_and_cannot_be_written(host: Host) -> None:
    dataset = host.source()
    first, second = await asyncio.gather(host.get(dataset), host.get(dataset))
    assert texts(first.path) == {"one.txt": "first", "below/two.txt": "second"}
    assert (first.path, first.sha256) == (second.path, second.sha256)
    assert (await host.get(dataset)).path == first.path
    assert host.num_fetched == 1
    assert host.lines[0] == f"dataset few: fetching 11 bytes in 2 files from {dataset.uri}"
    assert host.lines[1] == f"dataset few: fetched, sha256 {first.sha256}"
    assert not (first.path / "one.txt").stat().st_mode & 0o222


async def test_a_single_file_is_a_path_to_it(host: Host) -> None:
    host.source("few", **{"a b%20é.csv": "1,2"})
    uri = (host.sources / "few" / "a b%20é.csv").as_uri()
    found = await host.get(list_source(uri).registered("few", uri))
    assert (found.path.name, found.path.read_text()) == ("a b%20é.csv", "1,2")


@pytest.mark.long
async def test_a_folder_and_a_file_of_a_bucket_are_fetched(s3: S3Server, tmp_path: Path) -> None:
    ObjectStorage(s3.url).put("data/few/one.txt", [b"first"])
    ObjectStorage(s3.url).put("data/few/below/two.txt", [b"second"])
    ObjectStorage(s3.url).put("data/fewer.txt", [b"no part of it"])
    host = Host(tmp_path)
    uri = f"{s3.url}/data/few"
    dataset = list_source(uri).registered("few", uri)
    assert texts((await host.get(dataset)).path) == {"one.txt": "first", "below/two.txt": "second"}
    single = f"{uri}/one.txt"
    assert (await host.get(list_source(single).registered("one", single))).path.read_text() == "first"
    ObjectStorage(s3.url).put("data/few/one.txt", [b"other"])
    with pytest.raises(DataFailed, match=r"has changed since it was added: .*some with other content"):
        await host.get(dataset)
    s3.kill()
    other = Host(tmp_path / "other")
    waiting = asyncio.create_task(other.get(dataset))
    await until(lambda: any("waiting for the source" in line and "cannot be reached" in line for line in other.lines))
    waiting.cancel()
    assert texts((await host.get(dataset)).path)["one.txt"] == "first", "what was registered is here"
    assert "using what this host fetched before" in host.lines[-1]


async def test_a_folder_of_the_pool_is_a_source(host: Host, tmp_path: Path) -> None:
    pool = (tmp_path / "pool").as_uri()
    ObjectStorage(pool).put("jobs/job-1/output/x", [b"1"])
    dataset = list_source("pool:jobs/job-1/output", pool=pool).registered("made", "pool:jobs/job-1/output")
    assert texts((await host.get(dataset)).path) == {"x": "1"}
    for uri, pool_of_it in (("pool:jobs/../secret", pool), ("pool:", pool), ("pool:jobs", "")):
        with pytest.raises(SourceUnusable):
            list_source(uri, pool=pool_of_it)


@pytest.mark.parametrize("uri", ["nowhere", "empty"])
def test_a_source_without_files_is_refused_when_it_is_added_and_not_made(tmp_path: Path, uri: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceUnusable, match=r"there is no|there are no files"):
        list_source(source_uri(str(tmp_path / uri)))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("is_cached", [True, False])
@pytest.mark.parametrize("change", ["content", "more", "gone"])
async def test_a_source_that_has_changed_is_named_also_if_the_data_is_here(
    host: Host, change: str, *, is_cached: bool
) -> None:
    dataset = host.source()
    if is_cached:
        await host.get(dataset)
    if change == "gone":
        shutil.rmtree(host.sources)
    else:
        (host.sources / "few" / ("one.txt" if change == "content" else "three.txt")).write_text("other")
    with pytest.raises(DataFailed, match="there is no" if change == "gone" else "has changed since it was added") as e:
        await host.get(dataset)
    assert e.value.is_hosts_fault == (change == "gone"), "another host may have the folder"


async def test_a_source_that_changes_while_it_is_fetched_is_not_kept(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = host.source()
    read_range = ObjectStorage.read_range

    def changing(storage: ObjectStorage, key: str, start: int, stop: int) -> memoryview:
        (host.sources / "few" / "three.txt").write_text("more")
        return read_range(storage, key, start, stop)

    monkeypatch.setattr(ObjectStorage, "read_range", changing)
    with pytest.raises(DataFailed, match="has changed"):
        await host.get(dataset)
    assert host.leftovers() == []


async def test_two_processes_fetch_the_same_data_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = host.source()
    other = HostDatasets(host.folder, storage="")
    lines: list[str] = []
    found = await asyncio.gather(host.get(dataset), other.get(dataset, lines.append))
    assert found[0].path == found[1].path
    assert host.num_fetched + sum("fetching" in line for line in lines) == 1


FETCH = """
import asyncio, os, pathlib, signal, sys
from resile_learner.datasets.host_datasets import HostDatasets
from resile_shared.messages.datasets import Dataset
from resile_shared.storage.objects import ObjectStorage
def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)
read = ObjectStorage.read_range
ObjectStorage.read_range = lambda self, key, *range: read(self, key, *range) if key == "below/two.txt" else killed()
dataset = Dataset.model_validate_json(sys.argv[2])
asyncio.run(HostDatasets(pathlib.Path(sys.argv[1]), storage="").get(dataset, print))
"""


async def test_a_fetch_that_was_killed_is_begun_again(host: Host) -> None:
    dataset = host.source()
    command = [sys.executable, "-c", FETCH, str(host.folder), dataset.model_dump_json()]
    done = await asyncio.to_thread(subprocess.run, command, check=False, capture_output=True)
    assert done.returncode < 0
    (left,) = host.leftovers()
    assert not (host.folder / left / "complete").exists()
    assert texts((await host.get(dataset)).path) == {"one.txt": "first", "below/two.txt": "second"}


async def test_what_is_used_stays_and_what_is_too_large_is_refused(tmp_path: Path) -> None:
    host = Host(tmp_path, max_bytes=12)
    kept = await host.get(host.source("used", x="4444"))
    with pytest.raises(DataFailed, match="full of data that jobs use") as caught:
        await host.get(host.source("most", x="nine bytes"))
    assert caught.value.is_hosts_fault
    assert kept.path.is_dir()
    with pytest.raises(DataFailed, match="large has 14 bytes, and the cache of this host at most 12 bytes") as caught:
        await host.get(host.source("large", x="too many bytes"))
    assert caught.value.is_hosts_fault


async def test_the_least_recently_used_is_removed_first(tmp_path: Path) -> None:
    host = Host(tmp_path, max_bytes=12)
    paths = {}
    datasets = {name: host.source(name, x="4444") for name in ("a", "b", "c")}
    for age, (name, dataset) in enumerate(datasets.items()):
        found = await host.get(dataset)
        os.close(found.lock)
        os.utime(found.path.parent / "complete", (age, age))
        paths[name] = found.path
    os.close((await host.get(datasets["a"])).lock)
    await host.get(host.source("d", x="4444"))
    assert {name for name, path in paths.items() if path.exists()} == {"a", "c"}


async def test_a_full_disk_is_named_before_and_while_it_fills(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = host.source()
    monkeypatch.setattr(host.cache._cache, "_num_free", lambda: SPARE_BYTES)
    with pytest.raises(DataFailed, match=r"it has 11 bytes, and 67.1 MB are free on this host's disk: free") as caught:
        await host.get(dataset)
    assert caught.value.is_hosts_fault, "another host may have space"
    monkeypatch.undo()

    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(dataset_download.Download, "_fetch_file", full)
    with pytest.raises(DataFailed, match="no space is left on this host's disk"):
        await host.get(dataset)
    assert host.leftovers() == []
    monkeypatch.undo()
    assert (await host.get(dataset)).path.is_dir()


async def test_a_fetch_ends_when_the_host_closes(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = host.source()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(storage: ObjectStorage, key: str, start: int, stop: int) -> memoryview:
        loop.call_soon_threadsafe(began.set)
        next(iter(host.cache._fetches.values())).cancelled.wait()
        return memoryview(b"x" * (stop - start))

    monkeypatch.setattr(ObjectStorage, "read_range", slow)
    monkeypatch.setattr(dataset_download, "NUM_THREADS", 1)
    getting = asyncio.create_task(host.get(dataset))
    await began.wait()
    await host.cache.close()
    with pytest.raises(DataFailed, match="not needed any more"):
        await getting


async def test_progress_is_reported_while_data_arrives(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.01)
    read_range = ObjectStorage.read_range
    seen = asyncio.Event()

    def slow(storage: ObjectStorage, key: str, start: int, stop: int) -> memoryview:
        while not seen.is_set():
            pass
        return read_range(storage, key, start, stop)

    def on_line(line: str) -> None:
        host.lines.append(line)
        if "of 11 bytes fetched" in line:
            seen.set()

    monkeypatch.setattr(ObjectStorage, "read_range", slow)
    await host.cache.get(host.source(), on_line)
    assert "dataset few: 0 bytes of 11 bytes fetched" in host.lines


async def test_all_hosts_of_a_job_and_all_its_starts_have_the_same_data(tmp_path: Path) -> None:
    storage = (tmp_path / "job").as_uri()
    hosts = [Host(tmp_path / name) for name in ("first", "second")]
    dataset = hosts[0].source()
    jobs = [JobDatasets(host.cache) for host in hosts]

    async def get(number: int, job: str = "job-1") -> dict[str, str]:
        place = storage if job == "job-1" else f"{storage}-other"
        return await jobs[number].get(job, 1, [dataset], storage=place, on_line=hosts[number].lines.append)

    variables = await get(0)
    assert list(variables) == ["RESILE_DATASET_FEW"]
    changed = hosts[0].sources / "few" / "one.txt"
    times = changed.stat()
    changed.write_text("FIRST")
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))  # as another file system with the same listing
    with pytest.raises(DataFailed, match="dataset few has other content on this host than the job began with"):
        await get(1)
    assert await get(1, "job-2"), "another job may begin with it"


async def test_data_stays_while_a_worker_of_its_job_runs(tmp_path: Path) -> None:
    host = Host(tmp_path, max_bytes=4)
    jobs = JobDatasets(host.cache)
    few, more = host.source("few", x="4444"), host.source("more", x="4444")
    storage = (tmp_path / "job").as_uri()
    for worker in (1, 2):
        await jobs.get("job-1", worker, [few], storage=storage, on_line=host.lines.append)
    jobs.release("job-1", 3)  # one that was cancelled before it got anything
    jobs.release("job-1", 1)
    with pytest.raises(DataFailed, match="full of data that jobs use"):
        await jobs.get("job-2", 1, [more], storage=f"{storage}-2", on_line=host.lines.append)
    jobs.release("job-1", 2)
    await jobs.get("job-2", 2, [more], storage=f"{storage}-2", on_line=host.lines.append)
    await jobs.close()


async def test_a_path_that_must_exist_is_looked_for(host: Host, tmp_path: Path) -> None:
    jobs = JobDatasets(host.cache)
    assert await jobs.get("job-1", 1, (), storage="", mounts=[str(tmp_path)], on_line=print) == {}
    with pytest.raises(DataFailed, match=f"there is no {tmp_path}/nowhere on this host: mount it here") as caught:
        await jobs.get("job-1", 1, (), storage="", mounts=[f"{tmp_path}/nowhere"], on_line=print)
    assert caught.value.is_hosts_fault


@pytest.mark.parametrize("uri", ["file://[", f"file:///{'x' * 300}", "file:///a%00b"])
def test_what_no_file_can_be_called_is_an_unusable_source(uri: str) -> None:
    with pytest.raises(SourceUnusable, match="cannot be a dataset"):
        list_source(uri)


@pytest.mark.parametrize("uri", ["file://[", "file:///a\x1b[2J", "s3://x\ny", "http://127.0.0.1/x", "/srv/x"])
def test_a_registered_dataset_has_a_valid_uri(uri: str) -> None:
    with pytest.raises(ValidationError):
        Dataset(name="few", uri=uri, num_files=1, num_bytes=1, version="0" * 64)


def test_names_that_lead_out_of_a_source_are_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.source()
    found = {"../x": ObjectVersion(1, "")}
    monkeypatch.setattr(ObjectStorage, "versions", lambda *_, **__: found)
    with pytest.raises(SourceUnusable, match="leads out of it"):
        list_source((host.sources / "few").as_uri())


def test_versions_differ_with_names_sizes_and_marks() -> None:
    version = ObjectVersion
    listings = [
        Listing("file:///x", {"a": version(1, "e")}),
        Listing("file:///x", {"b": version(1, "e")}),
        Listing("file:///x", {"a": version(2, "e")}),
        Listing("file:///x", {"a": version(1, "f")}),
        Listing("file:///x", {"a": version(1, "e")}, file="a"),
    ]
    assert len({listing.version for listing in listings}) == len(listings)


def test_a_storage_that_makes_no_folder_says_that_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="there is no such folder"):
        ObjectStorage((tmp_path / "none").as_uri(), creates=False)
    assert not (tmp_path / "none").exists()
