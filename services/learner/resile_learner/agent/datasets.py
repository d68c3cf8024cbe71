"""The data of jobs on this host: the same files on all hosts, and whenever a job is resumed.

The first host that has the data of a job stores its digests with the job; what another host has must have the same.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from resile_shared.messages.datasets import Dataset, variable_of

from ..datasets import CachedDataset, DataFailed, Datasets
from ..preparation import OnLine

KEY = "data.json"


class JobDatasets:
    """The data of the jobs on this host. It stays in the cache from `get` until `release`."""

    def __init__(self, datasets: Datasets) -> None:
        self._datasets = datasets
        self._held: defaultdict[str, list[CachedDataset]] = defaultdict(list)
        self._workers: defaultdict[str, set[int]] = defaultdict(set)

    async def get(
        self,
        job: str,
        worker: int,
        datasets: Sequence[Dataset],
        *,
        storage: str,
        mounts: Sequence[str] = (),
        on_line: OnLine,
    ) -> dict[str, str]:
        """Return the environment variables of a worker, with the paths of its data, which is fetched if needed.

        ``storage`` is the URL of the job's folder in object storage. To be followed by `release` when the worker has
        ended, also if this raises. Raises DataFailed if the data cannot be had, or a path of ``mounts`` is not there.
        """
        self._workers[job].add(worker)
        for mount in mounts:
            if not await asyncio.to_thread(Path(mount).exists):
                raise DataFailed(
                    f"there is no {mount} on this host: mount it here, or leave the host out with --group",
                    is_hosts_fault=True,
                )
        if not datasets:
            return {}
        found: dict[str, CachedDataset] = {}
        for dataset in datasets:
            found[dataset.name] = await self._datasets.get(dataset, on_line)
            self._held[job].append(found[dataset.name])
        await asyncio.to_thread(_check_digests, storage, {name: data.sha256 for name, data in found.items()})
        return {variable_of(name): str(data.path) for name, data in found.items()}

    def release(self, job: str, worker: int) -> None:
        """A worker has ended; with the last one of its job here, the data may be removed from the cache."""
        self._workers[job].discard(worker)
        if not self._workers[job]:
            del self._workers[job]
            for data in self._held.pop(job, []):
                os.close(data.lock)

    async def close(self) -> None:
        """End the fetches that run, and release the data of all jobs."""
        await self._datasets.close()
        for job in list(self._held):
            self._workers.pop(job, None)
            for data in self._held.pop(job):
                os.close(data.lock)


def _check_digests(storage: str, digests: Mapping[str, str]) -> None:
    """Store the digests of a job's data, or compare them with what is stored. Raises DataFailed."""
    from resile_shared.storage import ObjectStorage, StorageError  # the clients of all clouds

    try:
        objects = ObjectStorage(storage)
        if objects.create(KEY, orjson.dumps(dict(digests))):
            return
        stored = orjson.loads(objects.read(KEY))
    except StorageError as error:
        raise DataFailed(str(error), is_hosts_fault=True) from error
    for name, sha256 in digests.items():
        if stored.get(name) != sha256:
            raise DataFailed(
                f"dataset {name} has other content on this host than the job began with: its source has changed, or is "
                f"another one here; add it again with `resile dataset add {name} URI`, and submit the job again"
            )
