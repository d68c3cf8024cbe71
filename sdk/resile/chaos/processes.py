"""The processes of a pool on this machine, read from /proc.

Services and agents are children of `resile up`, identified by their command lines; `pool/worker_processes.py`
finds workers.
"""

from collections.abc import Iterator
from pathlib import Path

from resile_learner.processes.descendants import descendants, processes
from resile_shared.errors import ResileError

from ..pool.worker_processes import RunningWorker, workers_below
from .attacks import Target, TargetKind


class TargetNotRunning(ResileError):
    """The target of an attack is not running."""

    def __init__(self, target: Target) -> None:
        super().__init__(f"{target} is not running: check with `resile top`, and try again")


class PoolProcesses:
    """The processes of the pool whose `resile up` is the process ``supervisor``."""

    def __init__(self, supervisor: int, *, object_store: int | None = None) -> None:
        self._supervisor = supervisor
        self.object_store = object_store
        """Process id of the local server that serves the storage; None: there is none."""

    def hosts(self) -> dict[str, int]:
        """Return the agents that run, by host."""
        return {host: pid for pid, words in self._children() if (host := _host_of(words))}

    def pid(self, what: TargetKind) -> int | None:
        """Return the process of a service, None while it is not running."""
        if what is TargetKind.OBJECT_STORE:
            store = self.object_store
            return store if store is not None and Path(f"/proc/{store}").exists() else None
        return next((pid for pid, words in self._children() if _is(what, words)), None)

    def workers(self, job: str | None = None) -> list[RunningWorker]:
        """Return the workers of ``job``, or of all jobs, by their numbers."""
        found = (worker for host, agent in self.hosts().items() for worker in workers_below(agent, host))
        return sorted((w for w in found if job in (None, w.job)), key=lambda w: (w.job, w.number))

    def victims(self, target: Target) -> list[int]:
        """Return the processes of ``target``; of a host all. Raises TargetNotRunning."""
        what, name = target.what, target.name
        if what.is_of_job:
            found = [w.pid for w in self.workers(target.job) if name in (w.job, f"{w.job}/{w.number}")]
        elif what.is_of_host:
            agent = self.hosts().get(name)
            below = [process.pid for process in descendants(agent)] if agent and what is TargetKind.HOST else []
            found = [agent, *below] if agent else []
        else:
            found = [pid] if (pid := self.pid(what)) else []
        if not found:
            raise TargetNotRunning(target)
        return found

    def _children(self) -> Iterator[tuple[int, list[str]]]:
        for process in processes():
            if process.parent == self._supervisor and not process.is_zombie:
                yield process.pid, _command_line(process.pid)


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _is(what: TargetKind, words: list[str]) -> bool:
    if what is TargetKind.BUS:
        return Path(words[0]).name == "nats-server" if words else False
    return f"resile_{what}" in words


def _host_of(words: list[str]) -> str:
    if "resile_learner" in words and "--host" in words:
        return words[words.index("--host") + 1]
    return ""
