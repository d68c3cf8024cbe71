"""What a job wrote is downloaded as it was at one time, while the job writes it again."""

import io
import logging
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from resile_monitor.api import downloads
from resile_monitor.api.problems import problems
from resile_shared.http.server import listening
from resile_shared.storage.objects import ObjectSnapshot, ObjectStorage


async def test_a_small_file_that_is_replaced_is_downloaded_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(tmp_path.as_uri())
    storage.put("small", [b"old"])
    piece, replacements = downloads._piece, [b"newer", b"new"]

    async def piece_after_replacement(snapshot: ObjectSnapshot, begin: int) -> memoryview:
        if replacements:
            storage.put("small", [replacements.pop(0)])
        return await piece(snapshot, begin)

    monkeypatch.setattr(downloads, "_piece", piece_after_replacement)
    archive = b"".join([bytes(part) async for part in downloads._tar(storage, "", ["small"])])
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        file = members.extractfile("small")
        assert file is not None
        assert file.read() == b"new"


async def test_a_download_breaks_off_when_its_job_is_deleted_and_that_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = ObjectStorage(tmp_path.as_uri())

    async def pieces() -> AsyncIterator[bytes]:
        yield b"the first piece"
        storage.snapshot("deleted")

    async def send(request: web.Request) -> web.StreamResponse:
        return await downloads._send(request, web.StreamResponse(), pieces())

    application = web.Application(middlewares=[problems])
    application.add_routes([web.get("/", send)])
    serving = listening(application, host="127.0.0.1", port=0)
    async with serving as url, aiohttp.ClientSession() as http, http.get(url) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
