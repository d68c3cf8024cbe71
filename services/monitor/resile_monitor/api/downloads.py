"""What a job has in object storage: the submitted code, its final model, what its workers wrote; all final models."""

import asyncio
import logging
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress

from aiohttp import web

from resile_shared.http.api import ModelList
from resile_shared.http.server import WRITE_SECONDS
from resile_shared.messages.jobs import JobState
from resile_shared.messages.message import Message
from resile_shared.storage.model_files import ModelFormat, key_of
from resile_shared.storage.objects import MissingObjectError, ObjectChanged, ObjectSnapshot, ObjectStorage

from ..views import models
from .operations import Operation
from .pool import Pool
from .problems import ProblemError
from .requests import answer, read_query

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
_ENDED_EARLY = {JobState.FAILED: "failed", JobState.STOPPED: "was stopped"}


class ModelQuery(Message):
    """The parameters of ``GET /v1/jobs/{job}/model``."""

    format: ModelFormat = "safetensors"


class Downloads:
    """The handlers below ``/v1/jobs/{job}`` that send files."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/jobs/{job}/model", "The final model", "application/octet-stream", query=ModelQuery)
    async def _model(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, ModelQuery)
        record = await self._pool.record(request.match_info["job"])
        if record.completed is None:
            raise ProblemError("unknown", f"job {record.job} has no final model: {_without_training(record.state)}")
        if record.completed.model is None:
            raise ProblemError(
                "unknown", f"the training of job {record.job} ended without a file of its model: its warnings say why"
            )
        key = f"jobs/{record.job}/{key_of(record.completed.model, query.format)}"
        return await self._send_object(request, key, f"{record.job}.{query.format}", "application/octet-stream")

    @Operation("get", "/v1/jobs/{job}/code", "The folder of code that was submitted", "application/gzip")
    async def _code(self, request: web.Request) -> web.StreamResponse:
        record = await self._pool.record(request.match_info["job"])
        try:
            return await self._send_object(
                request, record.spec.package, f"{record.job}-code.tar.gz", "application/gzip"
            )
        except MissingObjectError:
            raise ProblemError("unknown", f"the code of job {record.job} is not stored any more") from None

    async def _send_object(self, request: web.Request, key: str, name: str, content_type: str) -> web.StreamResponse:
        snapshot = await asyncio.to_thread(self._pool.storage.snapshot, key)
        response = _attachment(name, content_type)
        response.content_length = snapshot.num_bytes
        return await _send(request, response, _pieces(snapshot))

    @Operation("get", "/v1/jobs/{job}/output", "What the workers wrote to RESILE_OUTPUT_DIR", "application/x-tar")
    async def _output(self, request: web.Request) -> web.StreamResponse:
        job = (await self._pool.record(request.match_info["job"])).job
        folder = f"jobs/{job}/output/"
        sizes = await asyncio.to_thread(self._pool.storage.sizes, folder)
        if not sizes:
            raise ProblemError(
                "unknown", f"job {job} has no output: a script writes it to the folder RESILE_OUTPUT_DIR"
            )
        response = _attachment(f"{job}-output.tar", "application/x-tar")
        return await _send(request, response, _tar(self._pool.storage, folder, sorted(sizes)))


def _without_training(state: JobState) -> str:
    ended = _ENDED_EARLY.get(state)
    return f"it {ended} before its training ended" if ended else f"it is {state}, and its training has not ended"


def _attachment(name: str, content_type: str) -> web.StreamResponse:
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Type": content_type}
    return web.StreamResponse(headers=headers)


async def _send(
    request: web.Request, response: web.StreamResponse, pieces: AsyncIterator[bytes | memoryview]
) -> web.StreamResponse:
    """Send ``pieces``. If an object is replaced or deleted meanwhile, the connection breaks: the client asks again."""
    await response.prepare(request)
    try:
        async for piece in pieces:
            async with asyncio.timeout(WRITE_SECONDS):
                await response.write(piece)
    except (ObjectChanged, MissingObjectError) as error:
        logger.info("download broken off: %s", error)
        if request.transport is not None:
            request.transport.close()
        return response
    await response.write_eof()
    return response


async def _pieces(snapshot: ObjectSnapshot, *, start: int = 0) -> AsyncIterator[memoryview]:
    for begin in range(start, snapshot.num_bytes, PIECE_BYTES):
        yield await _piece(snapshot, begin)


async def _piece(snapshot: ObjectSnapshot, begin: int) -> memoryview:
    if begin == snapshot.num_bytes:
        return memoryview(b"")
    return await asyncio.to_thread(snapshot.read_range, begin, min(begin + PIECE_BYTES, snapshot.num_bytes))


async def _first_piece(storage: ObjectStorage, key: str) -> tuple[ObjectSnapshot, memoryview]:
    """Return an object, and its first piece: an object of one piece may be replaced at any time."""
    while True:
        snapshot = await asyncio.to_thread(storage.snapshot, key)
        with suppress(ObjectChanged):
            return snapshot, await _piece(snapshot, 0)


async def _tar(storage: ObjectStorage, folder: str, keys: list[str]) -> AsyncIterator[bytes | memoryview]:
    """Pack objects one after the other. Raises ObjectChanged if one is replaced after its first piece was sent."""
    for key in keys:
        snapshot, first = await _first_piece(storage, key)
        entry = tarfile.TarInfo(key.removeprefix(folder))
        entry.mtime = int(time.time())
        entry.size = snapshot.num_bytes
        yield entry.tobuf(tarfile.PAX_FORMAT)
        yield first
        async for piece in _pieces(snapshot, start=len(first)):
            yield piece
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


class Models:
    """Lists the models of jobs whose training has ended; `Downloads` sends them."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/models", "The models of jobs whose training has ended", ModelList)
    async def _list(self, _: web.Request) -> web.Response:
        return answer(models(self._pool.projection.records()))
