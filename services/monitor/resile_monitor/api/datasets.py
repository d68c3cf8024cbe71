"""Handlers for datasets: list, register, return, remove. They are objects in the pool's storage."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from resile_shared.errors import ResileError
from resile_shared.http.api import DatasetList, Empty, NewDataset
from resile_shared.messages.datasets import Dataset, DatasetName
from resile_shared.storage.dataset_sources import Listing, list_source
from resile_shared.storage.objects import MissingObjectError

from .operations import Operation
from .pool import Pool
from .problems import ProblemError
from .requests import answer, build, read_body, read_key

FOLDER = "datasets/"
MAX_REGISTERED = 1000
NUM_THREADS = 32
"""Threads that only list the sources of datasets, which may take minutes: other requests never wait for one."""
_NAME: TypeAdapter[str] = TypeAdapter(DatasetName)


class DatasetViews:
    """The handlers below ``/v1/datasets``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="sources")

    @Operation("get", "/v1/datasets", "All datasets", DatasetList)
    async def _list(self, _: web.Request) -> web.Response:
        return answer(DatasetList(datasets=await asyncio.to_thread(self._registered)))

    @Operation("get", "/v1/datasets/{dataset}", "A dataset as it was registered", Dataset)
    async def _show(self, request: web.Request) -> web.Response:
        return answer(await asyncio.to_thread(self._find, request.match_info["dataset"]))

    @Operation(
        "put", "/v1/datasets/{dataset}", "Register a dataset as it is now", Dataset, body=NewDataset, is_keyed=False
    )
    async def _add(self, request: web.Request) -> web.Response:
        name = _checked(request.match_info["dataset"])
        body = await read_body(request, NewDataset)
        try:
            listing = await self._listing(body.uri)
        except ResileError as error:
            raise ProblemError("invalid", str(error)) from error
        fields = {"num_files": len(listing.files), "num_bytes": listing.num_bytes, "version": listing.version}
        dataset = build(Dataset, {"name": name, "uri": body.uri, **fields})
        present = await asyncio.to_thread(self._names)
        if name not in present and len(present) >= MAX_REGISTERED:
            raise ProblemError("conflict", f"there are {MAX_REGISTERED} datasets already: remove one first")
        await asyncio.to_thread(self._pool.storage.put, _key(name), [dataset.model_dump_json().encode()])
        return answer(dataset)

    @Operation("delete", "/v1/datasets/{dataset}", "Remove a dataset; its files stay", Empty)
    async def _remove(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(self._delete, _checked(request.match_info["dataset"]), read_key(request))
        return answer(Empty())

    def _delete(self, name: str, key: str | None) -> None:
        """Remove a dataset. The key of the request is stored first, so that a repeated request succeeds."""
        storage, removal = self._pool.storage, f"{FOLDER}{name}.removed"
        if name in self._names():
            if key:
                storage.put(removal, [key.encode()])
            storage.delete([_key(name)])
            return
        with suppress(MissingObjectError):
            if key and storage.read(removal) == key.encode():
                return
        raise _unknown(name)

    async def _listing(self, uri: str) -> Listing:
        call = partial(list_source, uri, pool=self._pool.storage.url, request_seconds=self._pool.source_seconds)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _names(self) -> list[str]:
        """Return the registered names; other objects in the folder are ignored."""
        keys = self._pool.storage.sizes(FOLDER)
        return sorted(name for key in keys if key == _key(name := key.removeprefix(FOLDER)[:-5]) and _is_name(name))

    def _registered(self) -> tuple[Dataset, ...]:
        found: list[Dataset] = []
        for name in self._names():
            with suppress(MissingObjectError):  # removed meanwhile
                found.append(self._read(name))
        return tuple(found)

    def _find(self, name: str) -> Dataset:
        try:
            return self._read(_checked(name))
        except MissingObjectError:
            raise _unknown(name) from None

    def _read(self, name: str) -> Dataset:
        content = self._pool.storage.read(_key(name))
        try:
            return Dataset.model_validate_json(content)
        except ValidationError as error:
            raise ProblemError(
                "conflict",
                f"what is stored of dataset {name} cannot be read: add it again, or remove it "
                f"(`resile dataset remove {name}`)",
            ) from error


def _unknown(name: str) -> ProblemError:
    return ProblemError("unknown", f"there is no dataset {name}: GET /v1/datasets (`resile dataset list`) lists them")


def _is_name(name: str) -> bool:
    try:
        return bool(_NAME.validate_python(name))
    except ValidationError:
        return False


def _checked(name: str) -> str:
    if not _is_name(name):
        raise ProblemError(
            "invalid", f"{name[:64]!r} is not a valid name of a dataset: use up to 63 lower-case letters, digits and -"
        )
    return name


def _key(name: str) -> str:
    return f"{FOLDER}{name}.json"
