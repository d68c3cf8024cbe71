"""A folder for temporary files that is removed with the process that made it, however that ends.

Each worker has a folder of its own in it, which a child process removes when the worker has ended: that may take long,
and the fork server has other workers to serve.
"""

import fcntl
import os
import socket
import tempfile
from itertools import count
from pathlib import Path

from resile_shared.folders import remove_tree

from ..messages import WorkerConfig
from .forked import Entry

_PREFIX = "resile-scratch-"
_MARK = ".resile-scratch"
_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
# multiprocessing binds sockets in TMPDIR, at pymp-12345678/listener-12345678, and no socket has a path over 107 bytes.
# A worker's process id has at most seven digits.
_MAX_PARENT = 107 - len(f"/{_PREFIX}12345678/1234567/pymp-12345678/listener-12345678")


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
        os.environ.setdefault(_KERNELS, str(self.path / "torchinductor"))  # workers share what torch.compile compiles
        self.removers: set[int] = set()
        """Process ids of the child processes that remove folders."""
        self._numbers = count()

    def in_own_folder(self, entry: Entry) -> Entry:
        """Return an entry function that does the same in a worker with a folder of its own for temporary files.

        A job that sets TMPDIR keeps it. On a full disk the worker uses the shared folder.
        """

        def main(config: WorkerConfig, agent: socket.socket) -> int:
            if "TMPDIR" not in config.env:
                _make_temporary_folder(self._own_folder(os.getpid()))
            tempfile.tempdir = None  # a module that was imported before the fork may have asked for it
            return entry(config.model_copy(update={"shared_folder": str(self.path)}), agent)

        return main

    def remove_own_folder(self, pid: int) -> None:
        """Let a child process remove the folder of the worker with this process id, which has ended."""
        aside = self.path / f".removed-{next(self._numbers)}"
        try:
            self._own_folder(pid).rename(aside)
            self.removers.add(os.posix_spawnp("rm", ["rm", "-rf", "--", str(aside)], os.environ))
        except OSError:
            return  # it has none, or it goes with all others

    def _own_folder(self, pid: int) -> Path:
        return self.path / str(pid)

    def remove(self) -> None:
        """Remove the folder and all that was left in it."""
        remove_tree(self.path)


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
            remove_tree(path)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _make_temporary_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700)
    except OSError:
        return
    os.environ["TMPDIR"] = str(path)


def _parent() -> Path:
    parent = Path(tempfile.gettempdir())
    return parent if len(os.fsencode(parent)) <= _MAX_PARENT else Path("/tmp")
