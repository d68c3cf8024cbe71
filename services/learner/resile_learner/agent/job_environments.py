"""The environments of jobs: with the same versions of packages on all hosts, and whenever a job is resumed.

The first host that builds the environment of a job stores what was installed with the job; the others install that.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ..environments import Environment, EnvironmentFailed, Environments, in_use
from ..preparation import OnLine

KEY = "packages.txt"


class JobEnvironments:
    """The environments of jobs on this host."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments

    async def get(self, storage: str, requirements: Sequence[str], on_line: OnLine) -> Environment:
        """Return the environment of the job whose folder in object storage is ``storage``, built first if needed.

        Raises EnvironmentFailed.
        """
        if not requirements:
            return Environment()
        pins = await asyncio.to_thread(_read_pins, storage)
        environment = await self._environments.get(requirements, on_line, pins=pins)
        if not pins and not await asyncio.to_thread(_store_pins, storage, environment.packages):
            pins = await asyncio.to_thread(_read_pins, storage)
            environment = await self._environments.get(requirements, on_line, pins=pins)
        return environment

    def hold(self, environment: Environment) -> AbstractContextManager[int]:
        """Keep the environment from being removed while the block runs."""
        return in_use(Path(environment.folder))

    async def has(self, storage: str, requirements: Sequence[str]) -> bool:
        """Whether `get` need not build anything. Raises EnvironmentFailed."""
        return self._environments.has(requirements, pins=await asyncio.to_thread(_read_pins, storage))


def _read_pins(storage: str) -> str:
    from resile_shared.storage.objects import (  # the clients of all clouds
        MissingObjectError,
        ObjectStorage,
        StorageError,
    )

    try:
        return ObjectStorage(storage).read(KEY).decode()
    except MissingObjectError:
        return ""
    except UnicodeDecodeError as error:
        raise EnvironmentFailed(f"{KEY} of this job is damaged: submit the job again") from error
    except StorageError as error:
        raise EnvironmentFailed(str(error), is_hosts_fault=True) from error


def _store_pins(storage: str, packages: str) -> bool:
    """Store what was installed, unless another host was faster; return whether it is stored now."""
    from resile_shared.storage.objects import ObjectStorage, StorageError

    try:
        return ObjectStorage(storage).create(KEY, packages.encode())
    except StorageError as error:
        raise EnvironmentFailed(str(error), is_hosts_fault=True) from error
