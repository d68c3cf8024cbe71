"""A folder for temporary files that is removed with the process that made it, however that ends."""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "resile-scratch-"
_MARK = ".resile-scratch"
_STALE_SECONDS = 60.0
# multiprocessing binds sockets in TMPDIR, at pymp-12345678/listener-12345678, and no socket has a path over 107 bytes.
_MAX_PARENT = 107 - len(f"/{_PREFIX}12345678/pymp-12345678/listener-12345678")


class Scratch:
    """Makes TMPDIR of this process, and of all that it starts, a new folder, until `remove`.

    The folder is locked while its maker lives. One whose maker was killed is removed by the next maker, which
    recognizes it by a marker file inside: any other folder with such a name is left alone.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > _MAX_PARENT:
            parent = Path("/tmp")
        _remove_stale(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        (self.path / _MARK).touch()
        self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        os.environ["TMPDIR"] = str(self.path)
        tempfile.tempdir = None

    def remove(self) -> None:
        """Remove the folder and all that was left in it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            if time.time() - path.stat().st_mtime < _STALE_SECONDS or not (path / _MARK).exists():
                continue  # its maker may be about to lock it; or it is not ours
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
