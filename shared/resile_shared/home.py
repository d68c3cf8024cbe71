"""The home folder: where the runs of this user are kept, and the pool. Its format has a number."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .bus.credentials import write_private
from .errors import ResileError, UsageError

HOME_FORMAT = 1
_FORMAT = "format"
_OF_HOMES = (_FORMAT, "lock", "token", "pool.json", "storage-url", "bus", "hosts", "health")


def open_home(path: Path) -> Path:
    """Return the absolute path of the home at ``path``, made if needed. Raises UsageError if it cannot be used."""
    home = path.expanduser().absolute()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_format(home)
    except OSError as error:
        raise UsageError(
            f"the home folder {home} cannot be used: {error.strerror}; name another with --home or RESILE_HOME"
        ) from error
    if not os.access(home, os.W_OK | os.X_OK):
        raise UsageError(f"the home folder {home} is not writable: name another with --home or RESILE_HOME")
    return home


def is_home(folder: Path) -> bool:
    """Whether ``folder`` is a home, by what only homes hold together: also one that was copied in part."""
    return sum(os.path.exists(folder / name) for name in _OF_HOMES) >= 2


@contextmanager
def writing(home: Path) -> Iterator[None]:
    """Raise ResileError that names the home when something cannot be written there."""
    try:
        yield
    except OSError as error:
        raise ResileError(
            f"the home folder {home} cannot be written: {error.strerror}; free some space there, or name another with "
            "--home or RESILE_HOME"
        ) from error


def _check_format(home: Path) -> None:
    file = home / _FORMAT
    if not file.exists():
        home.chmod(0o700)
        write_private(file, f"{HOME_FORMAT}\n".encode())  # never half there, on a full disk
    text = file.read_text(errors="replace").strip()
    if text != str(HOME_FORMAT):
        raise UsageError(
            f"the home folder {home} has format {text!r} and this version of Resile knows {HOME_FORMAT}: "
            "update Resile, or choose another with --home or RESILE_HOME"
        )
