"""Simulated workers: the product's worker process, from bootstrap to exit, on simulated threads and connections.

Real are the control thread, the session, membership, rounds, state transfer, leave acknowledgement, links and their
handshakes, checkpoints with their uploads, and the agent's end of a worker (`WorkerProcess`). Simulated are the script
(`training.py`), the threads (`threads.py`), sockets (`sockets.py`), the object store (`storage.py`), and the fork.
"""

import asyncio
import functools
import random
import resource
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from greenlet import GreenletExit

import resile_learner.checkpoint.store
import resile_learner.checkpoint.uploads
import resile_learner.collectives.poller
import resile_learner.worker.bootstrap
import resile_learner.worker.control_thread
import resile_learner.worker.links
import resile_learner.worker.peers
import resile_shared.storage.objects
from resile_learner.checkpoint.snapshot import Snapshot
from resile_learner.messages import GangPlace, Order, WorkerConfig
from resile_learner.processes.client import OnTemplate
from resile_learner.processes.fork_protocol import TemplateContent, TemplateExited, TemplateLoaded
from resile_learner.processes.worker_process import OnOutput, WorkerProcess, open_connection
from resile_learner.session import current_session
from resile_learner.worker import bootstrap, control, control_thread, gang, links, peers
from resile_shared.messages.hosts import WorkerExit

from . import gangs
from .gangs import GangScript
from .loop import Process, SimLoop, current_process
from .patches import replaced
from .sockets import DataTransport, Replacing, SimNetwork, SimSocket, simulated_os, simulated_select, simulated_socket
from .storage import SimObjects
from .threads import BlockingTime, ProcessEnded, SimThreading, ThreadLoop
from .training import Begun, Commit, SimScript, SimTraining

EXIT_SECONDS = 0.002
"""Between the end of a process and the moment at which its agent learns of it."""
PART_BYTES = 400
"""Small, so that a checkpoint has several parts, and members share them."""
ABANDONED = WorkerExit(kind="abandoned")
TEMPLATE_SECONDS = 0.5
"""What the preparation of a template takes in the mean."""
MODULES = ("numpy.linalg", "sklearn", "sklearn.datasets")
"""What workers report to have imported."""


class SimCluster:
    """What all workers of a world share: threads, connections, storage, and what each of them committed.

    ``script_of`` returns what the script of a configuration does.
    """

    def __init__(self, loop: SimLoop, rng: random.Random, *, script_of: Callable[[WorkerConfig], SimScript]) -> None:
        self.loop = loop
        self.rng = rng
        self.script_of = script_of
        self.threads = SimThreading(loop, rng)
        self.network = SimNetwork(loop, self._delay)
        self.objects = SimObjects(self.threads, rng)
        self.delay_seconds = 0.0005
        """What bytes between two workers take in the mean."""
        self.kinds: dict[str, int] = {}
        """The kind of each host that is not of the first."""
        self.commits: list[Commit] = []
        self.on_begin: Callable[[Begun], None] = lambda begun: None
        self.on_complete: Callable[[], None] = lambda: None
        """Called by a worker that is about to report that training is complete."""
        self.on_commit: Callable[[Commit], None] = self.commits.append
        self.on_start: Callable[[SimWorker], None] = lambda worker: None
        self.on_end: Callable[[SimWorker], None] = lambda worker: None
        self.gangs: dict[str, dict[int, GangScript]] = {}
        """The scripts that have begun, by job and worker, of gangs."""
        self.living: dict[int, SimWorker] = {}
        """The processes that have not ended, by process id."""
        self.most_members: dict[Process, int] = {}
        """The number of workers for which each process may open enough files, for those that have a limit."""
        self.next_pid = 1000

    def finished_in_gang(self, job: str) -> list[int]:
        """Return the workers of a gang whose scripts have finished."""
        return [number for number, script in self.gangs.get(job, {}).items() if script.has_finished]

    def _delay(self) -> float:
        return self.rng.random() * 2 * self.delay_seconds

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Let the product's worker code use the simulated time, threads, connections and storage."""
        with replaced(*self.replacements()):
            yield

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """What `surroundings` replaces, as `replaced` takes it."""
        time, os_ = BlockingTime(self.threads), simulated_os(_exit_process)
        store = resile_learner.checkpoint.store
        threaded = (control, control_thread, resile_learner.collectives.poller, resile_learner.checkpoint.uploads)
        streams = types.SimpleNamespace(flush=lambda: None)
        return [
            *((module, "time", time) for module in _timed_modules()),
            *((module, "threading", self.threads) for module in threaded),
            (control_thread, "asyncio", Replacing(asyncio, new_event_loop=lambda: ThreadLoop(self.threads))),
            (control_thread, "os", os_),
            (control_thread, "sys", types.SimpleNamespace(stdout=streams, stderr=streams)),
            (resile_learner.collectives.poller, "os", os_),
            (resile_learner.collectives.poller, "select", simulated_select(self.threads)),
            (links, "socket", simulated_socket(self.network)),
            (peers, "TcpTransport", DataTransport),
            (peers, "resource", Replacing(resource, getrlimit=self._limit_of_files)),
            (peers.PeerConnections, "_count_own_descriptors", lambda _, limit: peers.OTHER_DESCRIPTORS),
            (store, "ThreadPoolExecutor", InlineExecutor),
            (Snapshot.__init__, "__kwdefaults__", Snapshot.__init__.__kwdefaults__ | {"part_bytes": PART_BYTES}),
            (resile_learner.checkpoint.uploads, "save_model", _save_model),
            (resile_shared.storage.objects, "_open", self.objects.open),
            (bootstrap, "keep_freed_memory", lambda: None),
            (bootstrap, "seed", lambda: None),
            (bootstrap, "ImportWatch", lambda folder: types.SimpleNamespace(imported=lambda: MODULES)),
            (bootstrap, "finish_script", lambda: None),
            (bootstrap, "run_script", self._run_script),
            (bootstrap, "run_in_gang", self._run_in_gang),
            *gangs.replacements(
                self.threads, _exit_process, run_script=self._run_gang_script, set_variables=self._join_gang
            ),
        ]

    def _limit_of_files(self, _: int) -> tuple[int, int]:
        process = current_process()
        most = self.most_members.get(process) if process is not None else None
        if most is None:
            return resource.RLIM_INFINITY, resource.RLIM_INFINITY
        limit = peers.OTHER_DESCRIPTORS + most * (len(links.KINDS) + peers.LEASES_PER_NEIGHBOR)
        return limit, limit

    def _run_in_gang(self, config: WorkerConfig, place: GangPlace, agent: SimSocket) -> None:
        gang.run_in_gang(config, place, gangs.BlockingSocket(self.threads, agent))  # type: ignore[arg-type]

    def _join_gang(self, order: Order, place: GangPlace) -> None:
        assert len(order.workers) == place.size
        worker = _worker_of(current_process())
        worker.gang = GangScript(worker.process, worker.config.worker, workers=order.workers, script=worker.script)

    def _run_gang_script(self, config: WorkerConfig) -> None:
        script = _worker_of(current_process()).gang
        assert script is not None
        script.run(self.gangs.setdefault(config.job, {}), self.threads, self.rng)

    def _run_script(self, config: WorkerConfig) -> None:
        """Run the script of this process."""
        worker = _worker_of(current_process())
        script = worker.script
        if script.import_seconds and worker.config.template is None:
            self.threads.sleep(script.import_seconds * (0.5 + self.rng.random()))
        worker.training = SimTraining(
            script,
            current_session(),
            worker.config.worker,
            sleep=self.threads.sleep,
            leave=worker.exit,
            kind=self.kinds.get(worker.process.host, 0),
            on_begin=lambda begun: self.on_begin(begun),
            on_commit=lambda commit: self.on_commit(commit),
            on_complete=lambda: self.on_complete(),
        )
        worker.result = worker.training.run()


class SimWorker:
    """One worker process."""

    def __init__(self, cluster: SimCluster, config: WorkerConfig, process: Process) -> None:
        self.config = config
        self.process = process
        self.script = cluster.script_of(config)
        self.pid = cluster.next_pid
        self.status: int | None = None
        self.training: SimTraining | None = None
        self.gang: GangScript | None = None
        self.result: Any = None
        self._cluster = cluster
        cluster.next_pid += 1
        process.worker = self  # type: ignore[attr-defined]
        process.on_death.append(self._on_death)

    def start(self, sock: Any) -> None:
        """Run it from its bootstrap on; ``sock`` connects it with its agent."""
        self._cluster.living[self.pid] = self
        self._cluster.on_start(self)
        self._cluster.threads.run(bootstrap.main, self.config, sock, name="main")

    def kill(self) -> None:
        """What SIGKILL does."""
        if self.status is None:
            self.status = -signal.SIGKILL
        self.process.crash()

    def exit(self, status: int) -> None:
        """End it, as ``os._exit`` does; never returns."""
        if self.process.is_dead:
            raise GreenletExit
        self.status = status
        self.process.crash()
        thread = self._cluster.threads.current_thread()
        if thread is not None and thread.is_running():
            thread.end()
        raise ProcessEnded

    def _on_death(self) -> None:
        if self._cluster.living.pop(self.pid, None):
            self._cluster.on_end(self)


class SimForkServer:
    """In place of `ForkServerClient`, for the agent that is the current process; its workers die with it.

    ``is_host_lost`` says, when they die, whether that is because the power of the host has failed.
    """

    def __init__(self, cluster: SimCluster, host: str, *, is_host_lost: Callable[[], bool] = lambda: False) -> None:
        self.pid = cluster.next_pid
        cluster.next_pid += 1
        self.running: dict[SimWorker, WorkerProcess] = {}
        self.templates: dict[int, OnTemplate] = {}
        """Those that were requested and have not ended; a template that hangs is one of them."""
        self.ready: set[int] = set()
        self._cluster = cluster
        self._host = host
        agent = current_process()
        assert agent is not None
        self._agent = agent
        self.process = Process(cluster.loop, f"{host}: fork server", host=host, clock=agent.clock)
        self._ended = asyncio.Event()
        self.process.on_death.append(self._on_death)
        agent.on_death.append(self._on_agent_death)
        self._is_host_lost = is_host_lost
        cluster.network.return_host(host)

    async def loaded(self) -> None:
        """Everything is imported at once."""

    async def prepare_template(self, number: int, content: TemplateContent, on_template: OnTemplate) -> None:
        """Prepare a template: it is of use, is refused, or hangs; one that is ready may die at any time."""
        if self.process.is_dead:
            on_template(TemplateExited(template=number, reason="its fork server ended"))
            return
        self.templates[number] = on_template
        fate = self._cluster.rng.random()
        seconds = 2 * TEMPLATE_SECONDS * self._cluster.rng.random()
        if fate < 0.1:
            return
        if fate < 0.2:
            refused = TemplateExited(template=number, reason="an import left 2 threads", is_refused=True)
            self._later(seconds, number, refused)
            return
        self._later(seconds, number, TemplateLoaded(template=number, num_modules=int(fate < 0.9), num_bytes=1 << 20))
        if fate < 0.4:
            self._later(20 * seconds, number, TemplateExited(template=number, reason="it was killed"))

    async def end_template(self, number: int) -> None:
        """End a template."""
        self.templates.pop(number, None)
        self.ready.discard(number)

    def _later(self, seconds: float, number: int, report: TemplateLoaded | TemplateExited) -> None:
        self._cluster.loop.call_later(seconds, self._report_template, number, report, context=self._agent.context())

    def _report_template(self, number: int, report: TemplateLoaded | TemplateExited) -> None:
        if isinstance(report, TemplateLoaded):
            if on_template := self.templates.get(number):
                self.ready.add(number)
                on_template(report)
            return
        self.ready.discard(number)
        if on_template := self.templates.pop(number, None):
            on_template(report)

    async def fork(self, config: WorkerConfig, on_output: OnOutput) -> WorkerProcess:
        """Start a worker; its end is known a moment after it."""
        if config.template not in self.ready:
            config = config.model_copy(update={"template": None})
        process = Process(
            self._cluster.loop,
            f"{config.job}/{config.worker} on {self._host}",
            host=self._host,
            clock=self._agent.clock,
        )
        ours, theirs = self._cluster.network.pair(process)
        reader, writer = await open_connection(ours)  # type: ignore[arg-type]
        worker = SimWorker(self._cluster, config, process)
        handle = WorkerProcess(config.worker, reader, writer, [_closed_output()], worker.kill)
        if self.process.is_dead:
            worker.process.crash()
            handle.ended(ABANDONED)
            return handle
        handle.forked(worker.pid)
        self.running[worker] = handle
        process.on_death.append(lambda: self._on_worker_end(worker))
        process.run(worker.start, theirs)
        return handle

    async def ended(self) -> None:
        """Wait for its end."""
        await self._ended.wait()

    async def close(self) -> None:
        """Kill every worker, and itself."""
        self.process.crash()

    def kill(self) -> None:
        """What SIGKILL does to the fork server: its workers die with it."""
        self.process.crash()

    def _on_agent_death(self) -> None:
        if self._is_host_lost():
            self._cluster.network.lose_host(self._host)
        self.process.crash()

    def _on_worker_end(self, worker: SimWorker) -> None:
        self._cluster.loop.call_later(EXIT_SECONDS, self._report, worker, context=self._agent.context())

    def _report(self, worker: SimWorker) -> None:
        handle = self.running.pop(worker)
        if self.process.is_dead:
            handle.ended(ABANDONED)
        else:
            handle.exited(-signal.SIGKILL if worker.status is None else worker.status, _NoKills())  # type: ignore[arg-type]

    def _on_death(self) -> None:
        for number in list(self.templates):
            self._later(0, number, TemplateExited(template=number, reason="its fork server ended"))
        for worker in list(self.running):
            worker.process.crash()
        self._cluster.loop.call_soon(self._ended.set, context=self._agent.context())


class _NoKills:
    """The kernel kills nothing for want of memory."""

    def claim(self) -> bool:
        return False


def _closed_output() -> Any:
    closed = asyncio.get_running_loop().create_future()
    closed.set_result(None)
    return types.SimpleNamespace(close=lambda: None), types.SimpleNamespace(closed=closed)


@functools.cache
def _timed_modules() -> tuple[types.ModuleType, ...]:
    """The modules of workers that read a clock or sleep."""
    names = sorted(
        name for name in sys.modules if name.startswith(("resile_learner.", "resile_shared.storage.objects"))
    )
    return tuple(
        sys.modules[name] for name in names if isinstance(getattr(sys.modules[name], "time", None), types.ModuleType)
    )


def current_worker() -> SimWorker | None:
    """The worker whose process runs now, if it is one."""
    return getattr(current_process(), "worker", None)


def _worker_of(process: Process | None) -> SimWorker:
    assert process is not None
    worker: SimWorker = process.worker  # type: ignore[attr-defined]
    return worker


def _exit_process(status: int) -> None:
    _worker_of(current_process()).exit(status)


def _save_model(state_dict: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    path = folder / "model.safetensors"
    path.write_bytes(state_dict["chain"].numpy().tobytes())
    return (path,)


class InlineExecutor:
    """In place of a pool of threads: runs each call at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "InlineExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> "_Done":
        return _Done(function, args)

    def shutdown(self, **_: object) -> None:
        pass


class _Done:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._error: Exception | None = None
        try:
            self._result = function(*args)
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result
