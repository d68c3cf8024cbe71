"""Environments: the packages that a job requires on top of the pool's, built once per host.

An environment is a virtual environment in a folder named by the digest of its requirements. Its own packages come
before the pool's, which stay visible; torch and Resile are always the pool's. pip builds it with the configuration
of this host: its index, or a folder of wheels without a network. An interrupted build is started over. A lock file
keeps two processes from building the same environment, and one from removing what another uses.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import signal
import site
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import Distribution, distributions, version
from math import inf
from pathlib import Path

from packaging.requirements import Requirement

from resile_shared.folders import remove_tree
from resile_shared.processes import dying_with_parent
from resile_shared.requirements import POOL_PACKAGES

from .preparation import OnLine, PreparationFailed, lock_folder, locked, remove_unused

logger = logging.getLogger(__name__)

KEEP_ENVIRONMENTS = 10
MAX_BYTES = 20 << 30
BUILD_SECONDS = 1800.0
BUILD_NICENESS = 10
END_SECONDS = 15.0
_COMPLETE = "complete"
_TEMPORARY = "tmp"
"""The folder within the environment in which pip unpacks and compiles, so that it goes with an interrupted build."""
_NO_SPACE = "No space left on device"


class EnvironmentFailed(PreparationFailed):
    """An environment cannot be built."""

    def __init__(self, reason: str, *, is_hosts_fault: bool = False) -> None:
        super().__init__(f"the job's environment cannot be built: {reason}", is_hosts_fault=is_hosts_fault)


@dataclass(frozen=True)
class Environment:
    """A complete environment."""

    folder: str = ""
    """The folder of the environment; empty for the pool's own."""
    packages: str = ""
    """The packages installed in the environment, as ``name==version`` sorted by name and separated by spaces."""


@dataclass(frozen=True)
class Wanted:
    """What an environment must contain."""

    requirements: tuple[str, ...]
    pins: tuple[str, ...] = ()
    """The versions that packages must have if they are installed, as ``name==version``."""

    @property
    def digest(self) -> str:
        """The name of the environment with all this over the pool's own packages."""
        pool = [f"python=={sys.version}", *(f"{name}=={version(name)}" for name in POOL_PACKAGES)]
        lines = [*pool, *self.requirements, "pins:", *self.pins]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


@dataclass
class _Build:
    task: asyncio.Task[Environment]
    num_callers: int = 0


class Environments:
    """The environments below ``folder``. Several processes may share the folder."""

    def __init__(self, folder: Path, *, variables: Mapping[str, str]) -> None:
        """Use the environments below ``folder``; pip runs with the environment ``variables``."""
        self._folder = folder
        self._variables = variables
        self._building: dict[str, _Build] = {}

    async def get(self, requirements: Sequence[str], on_line: OnLine, *, pins: str = "") -> Environment:
        """Return the environment with ``requirements``; build it first if needed, and pass on what pip prints.

        A build ends when all callers that wait for it are cancelled. ``pins`` is the `Environment.packages` of another
        environment with these requirements; this one must have the same versions. Raises EnvironmentFailed.
        """
        if not requirements:
            return Environment()
        wanted = self._wanted(requirements, pins)
        key = wanted.digest
        if key not in self._building:
            build = self._building[key] = _Build(asyncio.create_task(self._open(key, wanted, on_line)))
            build.task.add_done_callback(lambda _: self._forget(key, build))
        build = self._building[key]
        build.num_callers += 1
        try:
            return await asyncio.shield(build.task)
        finally:
            build.num_callers -= 1
            if not build.num_callers:
                self._forget(key, build)
                build.task.cancel()

    def has(self, requirements: Sequence[str], *, pins: str = "") -> bool:
        """Whether the environment that `get` would return already exists."""
        folder = self._folder / self._wanted(requirements, pins).digest
        return (folder / _COMPLETE).is_file()

    def _forget(self, key: str, build: "_Build") -> None:
        if self._building.get(key) is build:
            del self._building[key]

    def _wanted(self, requirements: Sequence[str], pins: str) -> Wanted:
        wanted = Wanted(tuple(requirements))
        if pins and not self._has(wanted, pins):
            wanted = Wanted(wanted.requirements, tuple(pins.split()))
        return wanted

    def _has(self, wanted: Wanted, packages: str) -> bool:
        """Whether the environment exists, with exactly these packages."""
        complete = self._folder / wanted.digest / _COMPLETE
        return complete.is_file() and complete.read_text() == packages

    async def close(self) -> None:
        """Cancel the builds in progress."""
        building = [build.task for build in self._building.values()]
        for task in building:
            task.cancel()
        await asyncio.gather(*building, return_exceptions=True)

    async def _open(self, key: str, wanted: Wanted, on_line: OnLine) -> Environment:
        folder = self._folder / key
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not await _is_complete(folder):
                async with locked(folder, fcntl.LOCK_EX) as descriptor:
                    if not (folder / _COMPLETE).is_file():  # another process may have been faster
                        await self._build(folder, wanted, descriptor, on_line)
                await self._try_prune()
            return Environment(str(folder), (folder / _COMPLETE).read_text())
        except OSError as error:
            raise EnvironmentFailed(f"{folder}: {error.strerror}", is_hosts_fault=True) from error

    async def _build(self, folder: Path, wanted: Wanted, lock: int, on_line: OnLine) -> None:
        _check_pool_packages(wanted.requirements)
        await asyncio.to_thread(remove_tree, folder)  # a build that was interrupted
        try:
            await self._run([sys.executable, "-m", "venv", "--without-pip", str(folder)], lock, on_line)
            packages = await asyncio.to_thread(_prepare, folder, wanted)
            command = [folder / "bin/python", "-m", "pip", "install", "--no-input", "--progress-bar=off"]
            files = ["--constraint", folder / "constraints.txt", "--requirement", folder / "requirements.txt"]
            words = [str(word) for word in [*command, *files]]
            await self._run(words, lock, on_line, TMPDIR=str(folder / _TEMPORARY))
            await asyncio.to_thread(_complete, folder, packages)
        except BaseException:
            await asyncio.to_thread(remove_tree, folder)
            raise

    async def _run(self, command: Sequence[str], lock: int, on_line: OnLine, **variables: str) -> None:
        """Run a command at low priority, with the environment variables of a build. Raises EnvironmentFailed."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "resile_learner.processes.reaper", str(os.getpid()), *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**self._variables, **variables},
            pass_fds=(lock,),  # nobody builds here while pip still writes, whatever becomes of this process
            start_new_session=True,
            preexec_fn=dying_with_parent(),
        )
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, process.pid, BUILD_NICENESS)
        errors: list[str] = []
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                async for line in _lines(process):
                    on_line(line)
                    if line.startswith("ERROR: ") or "error: " in line or _NO_SPACE in line:
                        errors.append(line.removeprefix("ERROR: "))
                status = await process.wait()
        except TimeoutError:
            raise EnvironmentFailed(f"pip took over {BUILD_SECONDS:g} seconds") from None
        finally:
            if process.returncode is None:
                await _end(process)
        if status:
            raise _failure(status, errors)

    async def _try_prune(self) -> None:
        """Prune, and only log a failure: it does not concern the build that caused the pruning."""
        try:
            await asyncio.to_thread(self._prune)
        except OSError as error:
            logger.warning("old environments not removed: %s", error)

    def _prune(self) -> None:
        """Remove interrupted builds, and the least recently used environments beyond the number kept, unless in use.

        Other processes may do the same at the same time.
        """
        last_used = {path: _last_used(path) for path in self._folder.glob(f"*/{_COMPLETE}")}
        for complete in sorted(last_used, key=last_used.__getitem__)[:-KEEP_ENVIRONMENTS]:
            remove_unused(complete.parent, partial(_remove, complete, last_used[complete]))
        for folder in [path for path in self._folder.iterdir() if path.is_dir() and _is_interrupted(path)]:
            remove_unused(folder, partial(_remove_interrupted, folder))


def _last_used(complete: Path) -> float:
    """When an environment was last used, from its file ``complete``; -inf if it is being removed."""
    try:
        return complete.stat().st_mtime
    except FileNotFoundError:
        return -inf


def _remove(complete: Path, last_used: float) -> None:
    if _last_used(complete) == last_used:  # else it was used, or removed and built again, before its lock was free
        complete.unlink(missing_ok=True)
        remove_tree(complete.parent)


def _remove_interrupted(folder: Path) -> None:
    if _is_interrupted(folder):  # it may have been completed before its lock was free
        remove_tree(folder)


def _is_interrupted(folder: Path) -> bool:
    return not (folder / _COMPLETE).is_file()


async def _is_complete(folder: Path) -> bool:
    """Whether the environment exists and is not being built or removed; it becomes the most recently used one."""
    async with locked(folder, fcntl.LOCK_SH):
        complete = folder / _COMPLETE
        if not complete.is_file():
            return False
        os.utime(complete)
        return True


@contextmanager
def in_use(folder: Path) -> Iterator[int]:
    """Yield a descriptor that keeps the environment from removal, in the block and while a process has inherited it."""
    lock = lock_folder(folder, fcntl.LOCK_SH)
    try:
        yield lock
    finally:
        os.close(lock)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the command's reaper kill it and everything that it has started."""
    with suppress(ProcessLookupError):  # it may have exited before the event loop is notified
        process.terminate()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:  # stopped, by what it ran
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than the reader's limit
            continue
        if not line:
            return
        yield line.decode(errors="replace").rstrip()


def _check_pool_packages(requirements: Sequence[str]) -> None:
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name not in POOL_PACKAGES:
            continue
        present = version(requirement.name)
        if requirement.url or not requirement.specifier.contains(present, prereleases=True):
            raise EnvironmentFailed(
                f"it requires {text}, and {requirement.name} stays that of the pool, {present}: change the requirement"
            )


def _prepare(folder: Path, wanted: Wanted) -> Path:
    """Make the pool's packages visible in the environment; return the folder of its own packages."""
    (folder / _TEMPORARY).mkdir()
    packages = next(folder.glob("lib/python*/site-packages"))
    pool = [path for path in site.getsitepackages() if os.path.isdir(path)]
    adding = "; ".join(f"site.addsitedir({path!r})" for path in pool)
    (packages / "pool.pth").write_text(f"import site; {adding}\n")
    constraints = [*(f"{name}=={version(name)}" for name in POOL_PACKAGES), *wanted.pins]
    (folder / "constraints.txt").write_text("\n".join(constraints) + "\n")
    (folder / "requirements.txt").write_text("\n".join(wanted.requirements) + "\n")
    return packages


def _complete(folder: Path, packages: Path) -> None:
    """Record what was installed, as the last step of a build. Raises EnvironmentFailed if that is too large."""
    num_bytes = sum(path.lstat().st_size for path in packages.rglob("*"))
    if num_bytes > MAX_BYTES:
        raise EnvironmentFailed(f"it has {num_bytes / 1e9:.0f} GB, and at most {MAX_BYTES / 1e9:.0f} GB are possible")
    remove_tree(folder / _TEMPORARY)
    installed: list[Distribution] = list(distributions(path=[str(packages)]))
    names = sorted(f"{each.name.lower().replace('_', '-')}=={each.version}" for each in installed)
    draft = folder / "draft"
    draft.write_text(" ".join(names))
    os.sync()  # the thousands of files of an environment are on the disk before it counts
    draft.rename(folder / _COMPLETE)


def _failure(status: int, errors: Sequence[str]) -> EnvironmentFailed:
    if any(_NO_SPACE in line for line in errors):
        return EnvironmentFailed("no space is left on this host's disk", is_hosts_fault=True)
    if status < 0:
        return EnvironmentFailed(f"pip was killed by signal {-status}", is_hosts_fault=True)
    reason = next(iter(errors), f"pip ended with exit status {status}")
    return EnvironmentFailed(f"{reason}; the log has what pip printed")
