"""A script's datasets, which several workers of a host may be about to download."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from resile_shared.errors import UsageError


def load_datasets(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the result of ``function``: a dataset for training, and one for tests or None. Raises UsageError.

    The first worker of a host downloads; the others wait for it, and then find the downloaded files.
    """
    with _locked(os.environ.get("DATA_DIR", "")):
        pair = function()
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise UsageError(
            f"the function for datasets returned {type(pair).__name__}: return two things, a dataset for training and "
            "one for tests or None"
        )
    return pair[0], pair[1]


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock ``folder``, if it can be locked: exclusively, or shared with all workers that had to wait."""
    lock = None
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)
