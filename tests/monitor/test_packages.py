"""Packages go in, models and output come out."""

import asyncio
import gzip
import hashlib
import io
import tarfile
from collections.abc import AsyncIterator

import aiohttp
import pytest

from resile_shared.http.api import PackageView
from resile_shared.messages.jobs import JobState

from .examples import COMPLETED, SPEC, job
from .monitors import Monitors, Scene


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


async def test_a_package_is_stored_whole_under_the_name_of_its_content(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    content = packed((tarfile.TarInfo("train.py"), b"print('hello')\n" * 1000))

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 50):
            yield content[start : start + 50]

    key = f"packages/{hashlib.sha256(content).hexdigest()}.tar.gz"
    for body in (content, in_pieces(), content):
        async with monitor.http.post("/v1/packages", data=body) as answer:
            assert answer.status == 201
            assert PackageView.model_validate_json(await answer.read()) == PackageView(package=key)
    assert monitors.storage.read(key) == content
    assert list(monitors.storage.sizes("packages")) == [key]


async def test_a_package_that_is_too_large_is_refused_and_not_kept(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start("--max-package-bytes", "1000")

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(100)

    for body in (bytes(1001), endless()):
        problem = await monitor.problem("POST", "/v1/packages", data=body)
        assert (problem.status, problem.code) == (413, "too large")
        assert "--max-package-bytes" in problem.detail
    bomb = packed((tarfile.TarInfo("zeros"), bytes(100_000)))
    assert len(bomb) < 1000
    assert (await monitor.problem("POST", "/v1/packages", data=bomb)).code == "too large"
    assert monitors.storage.sizes("packages") == {}


@pytest.mark.parametrize("name", ["../outside", "a/../../outside"])
async def test_a_package_that_reaches_out_of_its_folder_is_refused(monitors: Monitors, scene: Scene, name: str) -> None:
    monitor = await monitors.start()
    problem = await monitor.problem("POST", "/v1/packages", data=packed((tarfile.TarInfo(name), b"x")))
    assert (problem.status, "cannot be unpacked safely" in problem.detail) == (422, True)


async def test_the_final_model_is_downloaded_as_it_is_stored(monitors: Monitors, scene: Scene) -> None:
    model = bytes(range(256)) * 40_000  # more than one piece
    monitors.storage.put("jobs/job-1/models/lineage-1.safetensors", [model])
    monitors.storage.put("jobs/job-1/models/lineage-1.pt", [b"pickled"])
    await scene.store_job(job(state=JobState.COMPLETED, completed=COMPLETED))
    await scene.store_job(job("job-2", state=JobState.COMPLETED, completed=COMPLETED))
    await scene.store_job(job("job-3", completed=COMPLETED.model_copy(update={"model": None})))
    monitor = await monitors.start()
    async with monitor.http.get("/v1/jobs/job-1/model") as answer:
        assert (answer.status, answer.content_length) == (200, len(model))
        assert 'filename="job-1.safetensors"' in answer.headers["Content-Disposition"]
        assert await answer.read() == model
    async with monitor.http.get("/v1/jobs/job-1/model?format=pt") as answer:
        assert 'filename="job-1.pt"' in answer.headers["Content-Disposition"]
        assert await answer.read() == b"pickled"
    assert (await monitor.problem("GET", "/v1/jobs/job-1/model?format=zip")).status == 422
    assert "it is not there" in (await monitor.problem("GET", "/v1/jobs/job-2/model")).detail
    assert "without a file of its model" in (await monitor.problem("GET", "/v1/jobs/job-3/model")).detail


async def test_the_code_of_a_job_is_downloaded_as_it_was_submitted(monitors: Monitors, scene: Scene) -> None:
    await scene.store_job(job())
    monitor = await monitors.start()
    assert "not stored any more" in (await monitor.problem("GET", "/v1/jobs/job-1/code")).detail
    monitors.storage.put(SPEC.package, [b"the package"])
    async with monitor.http.get("/v1/jobs/job-1/code") as answer:
        assert (answer.status, answer.content_type, await answer.read()) == (200, "application/gzip", b"the package")


async def test_output_is_downloaded_as_one_archive(monitors: Monitors, scene: Scene) -> None:
    large = bytes(range(251)) * 20_000
    files = {"curve.csv": b"1,2\n", "empty": b"", "deep/er/large.bin": large, f"{'long' * 60}.txt": b"x"}
    for name, content in files.items():
        monitors.storage.put(f"jobs/job-1/output/{name}", [content])
    monitors.storage.put("jobs/job-1/models/lineage-1.safetensors", [b"not output"])
    await scene.store_job(job())
    monitor = await monitors.start()
    async with monitor.http.get("/v1/jobs/job-1/output") as answer:
        assert (answer.status, answer.content_type) == (200, "application/x-tar")
        archive = tarfile.open(fileobj=io.BytesIO(await answer.read()))  # noqa: SIM115
    found = {member.name: archive.extractfile(member) for member in archive}
    assert {name: file.read() for name, file in found.items() if file} == files


async def test_a_download_breaks_if_a_file_is_replaced_while_it_is_sent(monitors: Monitors, scene: Scene) -> None:
    key = "jobs/job-1/output/large"
    monitors.storage.put(key, [bytes(48 << 20)])  # more than sockets hold
    await scene.store_job(job())
    monitor = await monitors.start()
    async with monitor.http.get("/v1/jobs/job-1/output") as answer:
        await answer.content.readexactly(1000)
        monitors.storage.put(key, [b"1" * (48 << 20)])
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()


async def test_a_client_that_goes_in_the_middle_of_an_upload_leaves_nothing(monitors: Monitors, scene: Scene) -> None:
    monitor = await monitors.start()
    host, port = monitor.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/packages HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nAuthorization: "
        + monitor.http.headers["Authorization"].encode()
        + b"\r\n\r\n"
        + gzip.compress(b"half")
    )
    await writer.drain()
    writer.close()
    await monitor.answers("/readyz", 200)
    assert monitors.storage.sizes("packages") == {}
