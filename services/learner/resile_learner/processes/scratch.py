"""A folder for temporary files that is removed with the process that made it, however that ends."""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "resile-scratch-"
_MARK = ".resile-scratch"
# multiprocessing binds sockets in TMPDIR, at pymp-12345678/listener-12345678, and no socket has a path over 107 bytes.
_MAX_PARENT = 107 - len(f"/{_PREFIX}12345678/pymp-12345678/listener-12345678")


class Scratch:
    """Makes TMPDIR of this process, and of all that it starts, a new folder, until `remove`.

    The folder is locked before it gets its name, as long as its maker lives. `remove_stale` recognizes one whose maker
    was killed by a marker file inside: any other folder with such a name is left alone.
    """

    def __init__(self) -> None:
        remove_stale()
        draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=_parent()))
        (draft / _MARK).touch()
        self.lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.path = draft.rename(draft.with_name(draft.name.removeprefix(".")))
        os.environ["TMPDIR"] = str(self.path)
        tempfile.tempdir = None

    def remove(self) -> None:
        """Remove the folder and all that was left in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_stale() -> None:
    """Remove the folders whose makers were killed."""
    for path in _parent().glob(f"{_PREFIX}*"):
        try:
            if not (path / _MARK).exists():
                continue
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile, or not ours
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _parent() -> Path:
    parent = Path(tempfile.gettempdir())
    return parent if len(os.fsencode(parent)) <= _MAX_PARENT else Path("/tmp")
