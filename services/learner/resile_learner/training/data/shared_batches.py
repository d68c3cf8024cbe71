"""Batches that reading processes hand over although /dev/shm is full: in most containers it has 64 MB.

PyTorch shares tensors between processes as files there. A reading process that finds no room uses memory without a
name, as `collectives/segments.py` does, which only the memory of the machine or container limits.
"""

import os
from collections.abc import Callable
from functools import cache
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from ...hints import hint_about_small_shared_memory, is_about_shared_memory
from ...messages import Warned
from ...session import current_session

Rebuild = Callable[..., torch.UntypedStorage]


def use_unnamed_memory_if_full() -> None:
    """Let this process hand over tensors without /dev/shm once it is full. The receiver may get a copy."""
    storages: Any = torch.UntypedStorage
    allocate: Callable[..., torch.UntypedStorage] = storages._new_shared
    reduce_storage: Callable[[torch.UntypedStorage], tuple[Any, ...]] = reductions.reduce_storage
    was_full = False

    def unnamed(error: RuntimeError, num_bytes: int) -> torch.UntypedStorage:
        nonlocal was_full
        if not is_about_shared_memory(error):
            raise error
        was_full = True
        return _unnamed(error, num_bytes)

    def new_shared(num_bytes: int, **options: Any) -> torch.UntypedStorage:
        try:
            return allocate(num_bytes, **options)
        except RuntimeError as error:
            return unnamed(error, num_bytes)

    def reduce(storage: torch.UntypedStorage) -> tuple[Rebuild, tuple[Any, ...]]:
        try:
            rebuild, arguments = reduce_storage(storage)
        except RuntimeError as error:
            copy: Any = unnamed(error, storage.nbytes())
            rebuild, arguments = reduce_storage(copy.copy_(storage))
        return (_rebuild_and_report, (rebuild, *arguments)) if was_full else (rebuild, arguments)

    storages._new_shared = staticmethod(new_shared)
    ForkingPickler.register(torch.UntypedStorage, reduce)


def _unnamed(error: RuntimeError, num_bytes: int) -> torch.UntypedStorage:
    """Return memory that other processes can map. Raises ``error`` if there is none."""
    storages: Any = torch.UntypedStorage
    try:
        fd = os.memfd_create("resile-batch", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, num_bytes)  # a later write to memory that is not there would end the process
            storage: torch.UntypedStorage = storages._new_shared_fd_cpu(fd, num_bytes)
            return storage
        finally:
            os.close(fd)
    except OSError:
        raise error from None


def _rebuild_and_report(rebuild: Rebuild, *arguments: Any) -> torch.UntypedStorage:
    """Receive what a reading process that found /dev/shm full hands over."""
    _report()
    return rebuild(*arguments)


@cache
def _report() -> None:
    """Tell the user, once in this process. All workers say the same, so that it counts once."""
    session = current_session()
    session.report(Warned(worker=session.view.me, message=hint_about_small_shared_memory()))
