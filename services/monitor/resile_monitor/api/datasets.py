"""Handlers for datasets: list, register, compare with the source, remove. They are objects in the pool's storage."""

import asyncio

from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from resile_shared.api import DatasetList, Empty, NewDataset
from resile_shared.dataset_sources import SourceChanged, check_unchanged, list_source
from resile_shared.errors import ResileError
from resile_shared.messages.datasets import Dataset, DatasetName
from resile_shared.storage import MissingObjectError

from .pool import Pool
from .problems import ProblemError
from .requests import answer, build, read_body

FOLDER = "datasets/"
MAX_REGISTERED = 1000
_NAME: TypeAdapter[str] = TypeAdapter(DatasetName)


class DatasetViews:
    """The handlers below ``/v1/datasets``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        return [
            web.get("/v1/datasets", self._list),
            web.get("/v1/datasets/{dataset}", self._check),
            web.put("/v1/datasets/{dataset}", self._add),
            web.delete("/v1/datasets/{dataset}", self._remove),
        ]

    async def _list(self, _: web.Request) -> web.Response:
        return answer(DatasetList(datasets=await asyncio.to_thread(self._registered)))

    async def _check(self, request: web.Request) -> web.Response:
        """Return a dataset, if its source still has what was registered."""
        dataset = await asyncio.to_thread(self._find, request.match_info["dataset"])
        try:
            check_unchanged(dataset, await asyncio.to_thread(list_source, dataset.uri, pool=self._pool.storage.url))
        except SourceChanged as error:
            raise ProblemError("conflict", str(error)) from error
        except ResileError as error:
            raise ProblemError("invalid", f"dataset {dataset.name}: {error}") from error
        return answer(dataset)

    async def _add(self, request: web.Request) -> web.Response:
        name = _checked(request.match_info["dataset"])
        body = await read_body(request, NewDataset)
        try:
            listing = await asyncio.to_thread(list_source, body.uri, pool=self._pool.storage.url)
        except ResileError as error:
            raise ProblemError("invalid", str(error)) from error
        fields = {"num_files": len(listing.files), "num_bytes": listing.num_bytes, "version": listing.version}
        dataset = build(Dataset, {"name": name, "uri": body.uri, **fields})
        present = await asyncio.to_thread(self._pool.storage.sizes, FOLDER)
        if _key(name) not in present and len(present) >= MAX_REGISTERED:
            raise ProblemError("conflict", f"there are {MAX_REGISTERED} datasets already: remove one first")
        await asyncio.to_thread(self._pool.storage.put, _key(name), [dataset.model_dump_json().encode()])
        return answer(dataset)

    async def _remove(self, request: web.Request) -> web.Response:
        dataset = await asyncio.to_thread(self._find, request.match_info["dataset"])
        await asyncio.to_thread(self._pool.storage.delete, [_key(dataset.name)])
        return answer(Empty())

    def _registered(self) -> tuple[Dataset, ...]:
        keys = sorted(self._pool.storage.sizes(FOLDER))
        return tuple(Dataset.model_validate_json(self._pool.storage.read(key)) for key in keys)

    def _find(self, name: str) -> Dataset:
        try:
            return Dataset.model_validate_json(self._pool.storage.read(_key(_checked(name))))
        except MissingObjectError:
            raise ProblemError(
                "unknown", f"there is no dataset {name}: GET /v1/datasets (`resile dataset list`) lists them"
            ) from None


def _checked(name: str) -> str:
    try:
        return _NAME.validate_python(name)
    except ValidationError:
        raise ProblemError(
            "invalid", f"{name[:64]!r} is no name of a dataset: use up to 63 lower-case letters, digits and -"
        ) from None


def _key(name: str) -> str:
    return f"{FOLDER}{name}.json"
