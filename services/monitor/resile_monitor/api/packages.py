"""Packages of code: received completely, checked, and stored under the digest of their content."""

import asyncio
import hashlib
import re
from pathlib import Path
from tempfile import TemporaryDirectory

from aiohttp import web

from resile_shared.http.api import PackageView
from resile_shared.storage.archives import InvalidArchive, check_archive
from resile_shared.storage.objects import MissingObjectError, ObjectStorage

from .operations import Operation
from .pool import Pool
from .problems import Code, ProblemError
from .requests import answer, body_time

PIECE_BYTES = 1 << 20
UPLOAD_SECONDS = 900.0
MAX_CHECKS = 2
"""How many packages are checked at once."""
_KEY = re.compile(r"packages/[0-9a-f]{64}\.tar\.gz")
MAX_EXPANSION = 20
"""How many times larger than the largest allowed package the unpacked content may be."""


class Packages:
    """The handler of ``POST /v1/packages``."""

    def __init__(self, pool: Pool) -> None:
        self._storage = pool.storage
        self._max_bytes = pool.max_package_bytes
        self._checks = asyncio.Semaphore(MAX_CHECKS)

    @Operation(
        "post",
        "/v1/packages",
        "Store a folder of code",
        PackageView,
        status=201,
        body="application/gzip",
        is_keyed=False,
    )
    async def _take(self, request: web.Request) -> web.Response:
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        with TemporaryDirectory(prefix="resile-package-", ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "package.tar.gz"
            async with body_time(UPLOAD_SECONDS):
                digest = await self._receive(request, file)
            await self._check(file)
            key = f"packages/{digest}.tar.gz"
            await asyncio.to_thread(_store, self._storage, key, file)
        return answer(PackageView(package=key), status=201)

    async def _receive(self, request: web.Request, file: Path) -> str:
        digest, size = hashlib.sha256(), 0
        with await asyncio.to_thread(file.open, "wb") as stream:
            while piece := await self._receive_piece(request):
                size += len(piece)
                if size > self._max_bytes:
                    raise self._too_large()
                digest.update(piece)
                await asyncio.to_thread(stream.write, piece)
        return digest.hexdigest()

    async def _receive_piece(self, request: web.Request) -> bytes:
        async with body_time():
            return await request.content.read(PIECE_BYTES)

    async def _check(self, file: Path) -> None:
        try:
            async with self._checks:
                await check_archive(file, max_bytes=MAX_EXPANSION * self._max_bytes)
        except InvalidArchive as error:
            code: Code = "too large" if error.is_too_large else "invalid"
            raise ProblemError(code, f"the package must be a folder packed as tar.gz: {error}") from error

    def _too_large(self) -> ProblemError:
        return ProblemError(
            "too large",
            f"the package is larger than {self._max_bytes} bytes: leave data and results out of the folder, "
            "or start the monitor with a larger --max-package-bytes",
        )


def check_is_stored(storage: ObjectStorage, package: str) -> None:
    """Raise ProblemError unless ``package`` is the key of an uploaded package."""
    try:
        if _KEY.fullmatch(package):
            storage.size(package)
            return
    except MissingObjectError:
        pass
    raise ProblemError("invalid", f"there is no package {package}: upload it with POST /v1/packages")


def _store(storage: ObjectStorage, key: str, file: Path) -> None:
    try:
        storage.size(key)
    except MissingObjectError:
        storage.upload(key, file)
