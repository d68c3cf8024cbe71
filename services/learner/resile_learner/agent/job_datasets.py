"""The data of jobs on this host: the same files on all hosts, and whenever a job is resumed.

The first host that has the data of a job stores its digests with the job; what another host has must have the same.
"""

import asyncio
import errno
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from resile_shared.errors import ResileError
from resile_shared.messages.datasets import Dataset, variable_of

from ..datasets.cache import CachedDataset, DataFailed
from ..datasets.host_datasets import RETRY_SECONDS, HostDatasets
from ..preparation import OnLine
from ..threads import in_thread

KEY = "data.json"
_Digests = TypeAdapter(dict[str, str])


class JobDatasets:
    """The data of the jobs on this host. It stays in the cache from `get` until `release`."""

    def __init__(self, datasets: HostDatasets) -> None:
        self._datasets = datasets
        self._held: defaultdict[str, dict[Path, CachedDataset]] = defaultdict(dict)
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

        ``storage`` is the URL of the job's folder in object storage. Call `release` when the worker has ended, even if
        this raises. Raises DataFailed if the data cannot be provided, or a path of ``mounts`` does not exist.
        """
        self._workers[job].add(worker)
        for mount in mounts:
            await in_thread(_check_mount, mount)
        if not datasets:
            return {}
        known = await _retried(_read_digests, storage, on_line=on_line)
        found: dict[str, CachedDataset] = {}
        for dataset in datasets:
            data = await self._datasets.get(dataset, on_line, job=job, sha256=known.get(dataset.name))
            found[dataset.name] = self._hold(job, data)
        digests = {name: data.sha256 for name, data in found.items()}
        stored = known or await _retried(_store_digests, storage, digests, on_line=on_line)
        _compare(digests, stored, is_local=self._datasets.is_local)
        return {variable_of(name): str(data.path) for name, data in found.items()}

    def _hold(self, job: str, data: CachedDataset) -> CachedDataset:
        """Keep one descriptor of each dataset of a job, however many workers it has."""
        held = self._held[job].setdefault(data.path, data)
        if held is not data:
            os.close(data.lock)
        return held

    def release(self, job: str, worker: int) -> None:
        """A worker has ended; with the last one of its job here, the data may be removed from the cache."""
        self._workers[job].discard(worker)
        if not self._workers[job]:
            del self._workers[job]
            for data in self._held.pop(job, {}).values():
                os.close(data.lock)

    async def close(self) -> None:
        """End the fetches that run, and release the data of all jobs."""
        await self._datasets.close()
        for job in list(self._held):
            self._workers.pop(job, None)
            for data in self._held.pop(job).values():
                os.close(data.lock)


def _check_mount(mount: str) -> None:
    """Check that a path can be used here. Raises DataFailed."""
    try:
        os.stat(mount)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataFailed(
            f"there is no {mount} on this host: mount it here, or leave the host out with --group", is_hosts_fault=True
        ) from error
    except OSError as error:
        raise DataFailed(
            f"{mount} cannot be used on this host: {error.strerror}: correct that, or leave the host out with --group",
            is_hosts_fault=error.errno != errno.ENAMETOOLONG,
        ) from error


async def _retried(call: Callable[..., dict[str, str]], *args: object, on_line: OnLine) -> dict[str, str]:
    """Call in a thread, again while the storage cannot be reached. Raises DataFailed."""
    while True:
        try:
            return await in_thread(call, *args)
        except ResileError as error:
            if not getattr(error, "transient", False):
                raise DataFailed(str(error), is_hosts_fault=True) from error
            on_line(f"waiting for the storage: {error}")
        except ValueError as error:
            raise DataFailed(f"{KEY} of this job is damaged: submit the job again") from error
        await asyncio.sleep(RETRY_SECONDS)


def _read_digests(storage: str) -> dict[str, str]:
    """Return the digests of a job's data; none before a host has stored them. Raises StorageError, ValueError."""
    from resile_shared.storage.objects import MissingObjectError, ObjectStorage  # the clients of all clouds

    try:
        return _Digests.validate_json(ObjectStorage(storage).read(KEY))
    except MissingObjectError:
        return {}


def _store_digests(storage: str, digests: dict[str, str]) -> dict[str, str]:
    """Store the digests of a job's data; return those of the host that was first. Raises StorageError, ValueError."""
    from resile_shared.storage.objects import ObjectStorage  # the clients of all clouds

    return digests if ObjectStorage(storage).create(KEY, _Digests.dump_json(digests)) else _read_digests(storage)


def _compare(digests: Mapping[str, str], stored: Mapping[str, str], *, is_local: bool) -> None:
    """Check that the data of this host is what the job began with. Raises DataFailed."""
    option, again = (" --local", "run the script again") if is_local else ("", "submit the job again")
    for name, sha256 in digests.items():
        if stored.get(name) != sha256:
            raise DataFailed(
                f"dataset {name} has other content on this host than the job began with: its source has changed, or is "
                f"another one here; add it again with `resile dataset add {name} URI{option}`, and {again}"
            )
