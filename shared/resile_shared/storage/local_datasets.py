"""Datasets that are registered on this machine, for runs without a pool: a file in the home."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..errors import UsageError
from ..home import open_home, writing
from ..messages.datasets import Dataset

_FILE = "datasets.json"
_Registered = TypeAdapter(dict[str, Dataset])


def read_datasets(home: Path) -> dict[str, Dataset]:
    """Return the datasets registered in ``home``, by name. Raises UsageError if the file is not readable."""
    file = home.expanduser() / _FILE
    try:
        return _Registered.validate_json(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        raise UsageError(f"{file} cannot be read: remove it, and add the datasets again") from error


def find_dataset(home: Path, name: str) -> Dataset:
    """Return a dataset registered in ``home``. Raises UsageError if there is none of that name."""
    registered = read_datasets(home)
    if name not in registered:
        known = f"known are {', '.join(sorted(registered))}" if registered else "none is registered on this machine"
        raise UsageError(
            f"there is no dataset {name} for runs without a pool ({known}): add it with "
            f"`resile dataset add {name} PATH --local`"
        )
    return registered[name]


@contextmanager
def changing_datasets(home: Path) -> Iterator[dict[str, Dataset]]:
    """Yield the datasets registered in ``home``, to be changed; they are stored when the block ends.

    Other processes that change them wait. Raises UsageError, or ResileError if they cannot be written.
    """
    folder = open_home(home)
    with writing(folder), (folder / f"{_FILE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        registered = read_datasets(home)
        yield registered
        draft = folder / f"{_FILE}.new"
        draft.write_bytes(_Registered.dump_json(registered, indent=2))
        draft.replace(folder / _FILE)
