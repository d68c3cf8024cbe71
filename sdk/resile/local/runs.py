"""The home folder and the run folders in it: names, journals, locks, and which old runs are deleted.

A run folder is the run's storage. It also holds what its workers printed (`logs/worker-K.log`), the code that
it began with (`code`), and a journal: one JSON
object a line, only ever appended to, so that a run that was killed at any moment can be found and resumed. The journal
holds what a pool keeps in its buckets: the job's record, its history, and the newest generation.
"""

import contextlib
import errno
import fcntl
import os
import platform
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import pydantic

from resile_shared.errors import ResileError, UsageError
from resile_shared.folders import remove_tree
from resile_shared.home import open_home, writing
from resile_shared.messages.jobs import HistoryItem, JobRecord
from resile_shared.messages.message import at, timestamp
from resile_shared.messages.reports import BatchStep
from resile_shared.validation import phrase

KEEP_RUNS = 20
LOCK_SECONDS = 10.0
_REMOVED = ".removed-"
"""Prefix of the names of folders that are being deleted."""
_ID = re.compile(r"[a-z0-9][a-z0-9-]*-[0-9a-f]{6}")
KERNELS = "TORCHINDUCTOR_CACHE_DIR"
OUTPUT = "RESILE_OUTPUT_DIR"
KEEP_SECONDS = 30 * 86400.0


@dataclass(frozen=True)
class Journal:
    """What the journal of a run holds."""

    script: str = ""
    args: tuple[str, ...] = ()
    name: str = ""
    storage: str = ""
    record: JobRecord | None = None
    """The newest record of the job."""
    history: tuple[HistoryItem, ...] = ()
    """The whole history of the job."""
    generation: int = 0
    """The newest generation that was allocated."""
    batches: tuple[BatchStep, ...] = ()
    """The batches of another run, which this one replays."""
    changed: tuple[str, ...] = ()
    """What was changed of its code and arguments when it was resumed with `--code new`."""


class RunFolder:
    """One run's folder, locked for as long as this object, or the fork server that inherits `lock`, lives."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self.lock = lock
        _cut_torn_line(path / "journal")
        self.journal = read_journal(path)
        self.logs = path / "logs"
        self.logs.mkdir(mode=0o700, exist_ok=True)
        self.code = path / "code"
        """Where the code that the run began with is copied to."""
        self.output = path / "output"
        """Where workers write files to, unless the user has chosen another folder."""
        self._unwritten = b""
        self.journal_fault = ""
        """Why the journal lacks its last entries, if it does: they are written with the next one."""

    @property
    def job(self) -> str:
        """The run's id."""
        return self.path.name

    def note_start(
        self,
        script: Path,
        args: tuple[str, ...],
        name: str,
        storage: str,
        now: float,
        *,
        batches: tuple[BatchStep, ...] = (),
        changed: tuple[str, ...] = (),
    ) -> None:
        """Journal that the run starts or resumes. Raises ResileError if that cannot be done."""
        self._append(
            kind="run",
            script=str(script),
            args=args,
            name=name,
            storage=storage,
            batches=[step.model_dump() for step in batches],
            changed=changed,
            time=timestamp(at(now)),
        )
        if self.journal_fault:
            raise ResileError(f"the run's folder {self.path} cannot be written: {self.journal_fault}; choose a --home")

    def note_record(self, record: JobRecord, items: Iterable[HistoryItem]) -> None:
        """Journal the job's record and the new ``items`` of its history."""
        self._append(
            kind="record",
            record=record.model_dump(mode="json"),
            history=[item.model_dump(mode="json") for item in items],
        )

    def note_generation(self, generation: int) -> None:
        """Journal that the number ``generation`` is used."""
        self._append(kind="generation", generation=generation)

    def close(self) -> None:
        """Release the lock."""
        if self._unwritten:
            self._flush()
        os.close(self.lock)

    def _append(self, **entry: Any) -> None:
        self._unwritten += orjson.dumps(entry) + b"\n"
        self._flush()

    def _flush(self) -> None:
        """Write what is not in the journal yet, whole or not at all."""
        self.journal_fault = ""
        try:
            with (self.path / "journal").open("ab", buffering=0) as file:
                size = file.tell()
                if file.write(self._unwritten) < len(self._unwritten):
                    file.truncate(size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.journal_fault = error.strerror or repr(error)
        else:
            self._unwritten = b""


class Home:
    """The folder that keeps this user's runs."""

    def __init__(self, path: Path) -> None:
        """Open the home at ``path``, making it if needed. Raises UsageError if it cannot be used."""
        self.path = open_home(path)
        self.environments = self.path / "environments"
        self.datasets = self.path / "datasets"
        with writing(self.path):
            (self.path / "runs").mkdir(mode=0o700, exist_ok=True)

    def create(self, name: str) -> RunFolder:
        """Make the folder of a new run."""
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"
        path = self.path / "runs" / f"{slug}-{secrets.token_hex(3)}"
        with writing(self.path):
            path.mkdir(mode=0o700)
            lock = _try_lock(path)
            assert lock is not None, "nobody else knows of this folder yet"
            return RunFolder(path, lock)

    def resume(self, script: Path, run: str | None) -> RunFolder:
        """Open the run named ``run``, or the newest one of ``script``. Raises UsageError if there is none."""
        path = self._named(run) if run else self._newest(script)
        give_up = time.monotonic() + LOCK_SECONDS
        while (lock := _try_lock(path)) is None:
            if not path.is_dir():  # another process has pruned it meanwhile
                raise self._no_run(path.name)
            # The other processes of a run whose launcher was killed may take a moment to end.
            if _is_launcher_alive(path) or time.monotonic() > give_up:
                raise UsageError(f"the run {path.name} is still running; stop it first, or resume another one")
            time.sleep(0.05)
        return RunFolder(path, lock)

    def prune(self) -> None:
        """Delete the oldest run folders beyond the number kept, but none that is in use.

        Raises OSError if one cannot be deleted, after it has deleted the others.
        """
        faults: list[OSError] = []
        for path in self._by_age()[:-KEEP_RUNS]:
            try:
                _put_aside(path)
            except OSError as error:
                faults.append(error)
        for path in (self.path / "runs").glob(f"{_REMOVED}*"):
            remove_tree(path)
        if faults:
            raise faults[0]

    def _named(self, run: str) -> Path:
        path = self.path / "runs" / run
        if not _ID.fullmatch(run) or not path.is_dir():
            raise self._no_run(run)
        return path

    def _no_run(self, run: str) -> UsageError:
        known = ", ".join(path.name for path in self._by_age()[-3:]) or "none"
        return UsageError(f"there is no run {run!r} in {self.path}; the newest runs there: {known}")

    def _newest(self, script: Path) -> Path:
        for path in reversed(self._by_age()):
            if read_journal(path).script == str(script):
                return path
        raise UsageError(f"there is no run of {script} in {self.path} to resume: start one without --resume")

    def _by_age(self) -> list[Path]:
        paths = [path for path in (self.path / "runs").iterdir() if _ID.fullmatch(path.name) and path.is_dir()]
        return sorted(paths, key=_last_change)


def _last_change(path: Path) -> float:
    for file in (path / "journal", path):  # a folder just made has no journal yet
        with contextlib.suppress(FileNotFoundError):
            return file.stat().st_mtime
    return 0.0


def _put_aside(path: Path) -> None:
    """Rename the run folder ``path`` for deletion, unless it is in use: nobody opens one that is half deleted."""
    lock = _try_lock(path)
    if lock is not None:
        try:
            path.rename(path.with_name(_REMOVED + path.name))
        finally:
            os.close(lock)


def _try_lock(path: Path) -> int | None:
    """Lock the run folder ``path``; return None if it is in use or gone."""
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), (path / "lock").stat())
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    if not is_there:
        os.close(descriptor)
        return None
    os.truncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def _is_launcher_alive(path: Path) -> bool:
    try:
        text = (path / "lock").read_text()
    except FileNotFoundError:
        return False
    return text.isdigit() and Path(f"/proc/{text}").exists()


def read_journal(path: Path) -> Journal:
    """Read the journal of the run folder ``path``. Raises ResileError if it is damaged."""
    journal = Journal()
    record: dict[str, Any] | None = None
    history: list[Any] = []
    batches: list[Any] = []
    generation = 0
    for entry in _entries(path / "journal"):
        match entry:
            case {"kind": "run", "script": str(script), "args": list(args), "name": str(name), "storage": str(storage)}:
                changed = tuple(map(str, entry.get("changed", ())))
                journal = Journal(script, tuple(map(str, args)), name, storage, changed=changed)
                batches = entry.get("batches", [])
            case {"kind": "record", "record": dict(newest), "history": list(items)}:
                record, history = newest, [*history, *items]
            case {"kind": "generation", "generation": int(number)}:
                generation = max(generation, number)
    journal = replace(journal, generation=generation)
    try:
        journal = replace(journal, batches=tuple(BatchStep.model_validate(step) for step in batches))
        if record is None:
            return journal
        stored = JobRecord.model_validate_json(orjson.dumps(record))
        told = tuple(HistoryItem.model_validate_json(orjson.dumps(item)) for item in history)
    except pydantic.ValidationError as error:
        fault = phrase(error.errors()[0]["msg"])
        raise ResileError(f"{path / 'journal'} is not readable: {fault}; start a new run without --resume") from error
    return replace(journal, record=stored, history=told)


def _entries(file: Path) -> Iterator[Any]:
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, start=1):
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            if number < len(lines):
                raise ResileError(f"{file}, line {number} is not readable: start a new run without --resume") from error


def _cut_torn_line(file: Path) -> None:
    """Cut off a last line that is incomplete because its writer was killed."""
    with contextlib.suppress(FileNotFoundError), file.open("rb+") as journal:
        journal.truncate(journal.read().rfind(b"\n") + 1)


def kernel_folder(home: Path) -> Path:
    """Make the folder of this host and version of PyTorch in ``home``, and remove those that were not used for a month.

    All runs of a home belong to one user, so none can make another execute code that it could not run itself. Raises
    OSError.
    """
    kernels = home / "kernels"
    folder = kernels / f"torch-{version('torch')}-{platform.node()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.utime(folder)  # its last use
    for path in kernels.iterdir():
        if time.time() - path.stat().st_mtime > KEEP_SECONDS:
            remove_tree(path)
    return folder
