"""What others would train with: torchrun elastic and torchft, with the settings that let them recover fastest.

What they run is `recovered.py`. All their processes end with the block.
"""

import asyncio
import os
import random
import socket
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from stamps import Stamps

from resile_shared.processes import dying_with_parent

SCRIPT = Path(__file__).resolve().with_name("recovered.py")
CONSTRAINTS = SCRIPT.parents[1] / "constraints.txt"
ADDRESS = "127.0.0.1"
NUM_WORKERS = 4
NUM_AGENTS = 2
TORCHFT = "torchft-nightly"
RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"


class Unusable(Exception):
    """A peer cannot be measured here."""


@asynccontextmanager
async def _processes(folder: Path) -> AsyncIterator["Started"]:
    started = Started(folder)
    try:
        yield started
    finally:
        started.end()


class Started:
    """Processes with one log, ended together with all below them."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "log"
        self._processes: list[psutil.Popen] = []

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> psutil.Popen:
        """Start a process."""
        with self._log.open("ab") as log:
            process = psutil.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
                preexec_fn=dying_with_parent(),
            )
        self._processes.append(process)
        return process

    def end(self) -> None:
        """Kill all."""
        alive = [process for process in self._processes if process.poll() is None]
        for process in alive:
            process.suspend()  # it starts nothing more
        below = [child for process in alive for child in process.children(recursive=True)]
        for process in (*alive, *below):
            if process.is_running():
                process.kill()
        psutil.wait_procs([*self._processes, *below], timeout=10)


class UnderTorchrun:
    """A training by torchrun."""

    size = NUM_WORKERS

    def __init__(self, stamps: Stamps, agents: Sequence[psutil.Popen]) -> None:
        self.stamps = stamps
        self._agents = agents

    def victims(self, chance: random.Random) -> Sequence[int]:
        """Return a worker."""
        workers = [child for agent in self._agents for child in agent.children() if str(SCRIPT) in child.cmdline()]
        return [chance.choice(sorted(worker.pid for worker in workers))]

    async def mend(self) -> None:
        """Its agents do that."""


@asynccontextmanager
async def torchrun(folder: Path) -> AsyncIterator[UnderTorchrun]:
    """Train by torchrun, with as many agents as the pool has hosts."""
    stamps = Stamps(folder / "stamps")
    port = _free_port()
    async with _processes(folder) as processes:
        agents = [
            processes.start(
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes=1:{NUM_AGENTS}", f"--nproc-per-node={NUM_WORKERS // NUM_AGENTS}"),
                *("--max-restarts=1000", "--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-id=bench"),
                *(f"--rdzv-endpoint={ADDRESS}:{port}", f"--rdzv-conf={RENDEZVOUS}"),
                *(str(SCRIPT), "--by=torchrun", f"--stamps={stamps.path}", f"--checkpoint={folder / 'checkpoint'}"),
                environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
            )
            for _ in range(NUM_AGENTS)
        ]
        yield UnderTorchrun(stamps, agents)


class UnderTorchft:
    """A training by torchft: each worker is a replica group of its own."""

    size = NUM_WORKERS

    def __init__(self, stamps: Stamps, processes: Started, python: str, lighthouse: str) -> None:
        self.stamps = stamps
        self._processes = processes
        self._python = python
        self._lighthouse = lighthouse
        self._replicas = {number: self._start(number) for number in range(NUM_WORKERS)}

    def _start(self, number: int) -> psutil.Popen:
        return self._processes.start(
            *(self._python, str(SCRIPT), "--by=torchft", f"--stamps={self.stamps.path}", f"--replica={number}"),
            environment={"TORCHFT_LIGHTHOUSE": self._lighthouse, "OMP_NUM_THREADS": "1"},
        )

    def victims(self, chance: random.Random) -> Sequence[int]:
        """Return a replica."""
        return [chance.choice(sorted(process.pid for process in self._replicas.values()))]

    async def mend(self) -> None:
        """Start again what has ended, which torchft leaves to others."""
        for number, process in self._replicas.items():
            if process.poll() is not None:
                self._replicas[number] = self._start(number)


@asynccontextmanager
async def torchft(folder: Path) -> AsyncIterator[UnderTorchft]:
    """Train by torchft. Raises Unusable where its wheel cannot be had or does not go with this torch."""
    stamps = Stamps(folder / "stamps")
    python = await asyncio.to_thread(_install_torchft)
    port = _free_port()
    settings = {"--min_replicas": 1, "--heartbeat_timeout_ms": 1000, "--join_timeout_ms": 1000, "--quorum_tick_ms": 50}
    async with _processes(folder) as processes:
        words = (str(word) for pair in settings.items() for word in pair)
        processes.start(str(python.with_name("torchft_lighthouse")), f"--bind={ADDRESS}:{port}", *words)
        yield UnderTorchft(stamps, processes, str(python), f"http://{ADDRESS}:{port}")


def _install_torchft() -> Path:
    """Return the Python of an environment with torchft; all else, torch too, is what this process uses."""
    environment = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "resile-bench" / "torchft"
    python = environment / "bin" / "python"
    if not python.exists():
        _call(sys.executable, "-m", "venv", str(environment))
        own = Path(_call(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        (own / "beside.pth").write_text(sysconfig.get_path("purelib"))
    import torch

    _call(str(python), "-m", "pip", "install", "--quiet", f"--constraint={CONSTRAINTS}", TORCHFT)
    found = _call(str(python), "-c", "import torchft, torch; print(torch.__version__)").strip()
    if found != torch.__version__:
        raise Unusable(f"its environment has torch {found} instead of {torch.__version__}: remove {environment}")
    return python


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unusable(f"{' '.join(command[:5])} ...: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((ADDRESS, 0))
        port: int = sock.getsockname()[1]
        return port
