"""The agent's own folder: its lock, its incarnation, and a folder for each job."""

import asyncio
import fcntl
import os
import secrets
import time
from math import inf
from pathlib import Path

from resile_shared.errors import UsageError
from resile_shared.folders import remove_tree

LOCK_SECONDS = 20.0
KEEP_JOBS = 20


class AgentFolder:
    """One agent's folder, locked while this agent or a fork server that inherits ``lock`` runs.

    So a new agent starts only when no worker of an earlier one is left.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        self.packages = path / "packages"
        self.environments = path / "environments"
        self.datasets = path / "datasets"
        self.jobs = path / "jobs"
        self._code = path / "code"
        remove_tree(self._code)
        self._code.mkdir(exist_ok=True)
        self.packages.mkdir(exist_ok=True)
        self.jobs.mkdir(exist_ok=True)

    @classmethod
    async def open(cls, path: Path) -> "AgentFolder":
        """Make the folder if needed, and acquire its lock. Raises UsageError."""
        lock = _open_lock(path)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return cls(path.absolute(), lock)  # noqa: ASYNC240 - no input or output
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(lock)
                    raise UsageError(
                        f"--folder: another agent, or a worker of one, uses {path}: end it, or name another folder"
                    ) from None
            await asyncio.sleep(0.05)

    def close(self) -> None:
        """Release the lock."""
        os.close(self.lock)

    @property
    def incarnation(self) -> int:
        """The newest incarnation; 0 before the first. Raises UsageError."""
        file = self.path / "incarnation"
        try:
            return int(file.read_text())
        except FileNotFoundError:
            return 0
        except ValueError:
            raise UsageError(f"{file} holds no number: remove it, and the pool is asked for the last one") from None

    def note_incarnation(self, incarnation: int) -> None:
        """Store the incarnation durably."""
        draft = self.path / "incarnation.new"
        with draft.open("w") as file:
            file.write(f"{incarnation}\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / "incarnation")
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)

    def output(self, job: str) -> Path:
        """Return the folder that a job's workers write files to; it is there once `make_output` has made it."""
        return self.jobs / job / "output"

    def make_output(self, job: str) -> Path:
        """Make the folder that a job's workers write files to, if needed; return it. Raises OSError."""
        path = self.output(job)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def code(self, job: str) -> Path:
        """Return the folder of a job's code, which its workers run in; it is there once it is unpacked."""
        return self._code / job

    def jobs_with_files(self) -> list[str]:
        """Return the jobs that have code or output here."""
        output = {path.parent.name for path in self.jobs.glob("*/output")}
        return sorted(output | {path.name for path in self._code.glob("[!.]*")})

    def all_jobs(self) -> list[str]:
        """Return the jobs that have any files here, even if only logs."""
        return sorted({*self.jobs_with_files(), *(path.name for path in self.jobs.iterdir())})

    def drop_files(self, job: str) -> list[Path]:
        """Move a job's code and output aside at once; return where they are now, to be removed."""
        present = [path for path in (self.code(job), self.output(job)) if path.exists()]
        return [path.rename(path.with_name(f".{path.name}-{secrets.token_hex(4)}")) for path in present]

    def old_jobs(self) -> list[Path]:
        """Return the oldest of the jobs' folders without output, beyond the number kept for their logs."""
        ended = [path for path in self.jobs.iterdir() if not (path / "output").exists()]
        return sorted(ended, key=_changed)[:-KEEP_JOBS]


def _changed(path: Path) -> float:
    """When the folder was changed; as if later than any other if it is being removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return inf


def _open_lock(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--folder: {folder} cannot be used: {error.strerror}") from error
