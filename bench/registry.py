"""One registry and many hosts: what it costs, that nobody is lost by mistake, and how fast real losses are seen.

    python bench/registry.py [--quick | --tiny] [--hosts 10000] [--seconds 60]

Other processes play the agents: their hosts say hello and beat once a second, to a real nats-server and the real
registry. Then some of them fall silent; the time runs from a host's last beat to the moment at which its record says
so to whoever watches.
"""

import asyncio
import multiprocessing
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import psutil
from report import Target, argument_parser, conclude, print_table

from resile_shared.bus import subjects
from resile_shared.bus.client import Bus
from resile_shared.bus.credentials import Credentials, read_credentials
from resile_shared.bus.envelope import encode, headers_for
from resile_shared.bus.nats_server import NatsServer
from resile_shared.bus.subjects import HOSTS
from resile_shared.messages.hosts import Heartbeat, HostHello, HostState, Slot
from resile_shared.version import VERSION
from resile_testing.waiting import until

NUM_PROCESSES = 2
SLICES = 50
HELLOS_UNDER_WAY = 32
NUM_SILENT = 100
DETECTION_SECONDS = 3.0
MARGIN_SECONDS = 1.0


@dataclass
class Hosts:
    """Some of the hosts, in a process of their own. Their beats are spread over the second."""

    bus: Bus
    names: list[str]
    silent: dict[str, float] = field(default_factory=dict)
    """Hosts that have stopped, and when they beat last."""
    joined: set[str] = field(default_factory=set)
    most_late: float = 0.0
    _last: dict[str, float] = field(default_factory=dict)

    async def join(self) -> None:
        """Say hello for all hosts; each beats from then on."""
        room = asyncio.Semaphore(HELLOS_UNDER_WAY)

        async def hello(name: str) -> None:
            slots = tuple(Slot(index=index) for index in range(8))
            message = HostHello(
                host=name, incarnation=1, address="127.0.0.1", slots=slots, device_class="cpu", version=VERSION
            )
            async with room:
                await self.bus.publish(subjects.host_event(name, "hello"), message)
            self.joined.add(name)

        await asyncio.gather(*(hello(name) for name in self.names))

    async def beat(self) -> None:
        """Beat for all hosts that have joined and are not silent, once a second, for ever."""
        beats = {}
        for name in self.names:
            message = Heartbeat(host=name, incarnation=1, number=1)
            beats[name] = (encode(message), headers_for(message, source="learner"))
        due = time.monotonic()
        while True:
            for part in range(SLICES):
                for name in self.names[part::SLICES]:
                    if name in self.joined and name not in self.silent:
                        body, headers = beats[name]
                        headers["ce-id"] = secrets.token_hex(16)
                        await self.bus.connection.send(subjects.heartbeat(name), body, headers=headers)
                        self._last[name] = time.time()
                due += 1.0 / SLICES
                self.most_late = max(self.most_late, time.monotonic() - due)
                await asyncio.sleep(max(due - time.monotonic(), 0.0))

    async def wait_for_beats(self) -> None:
        """Wait until each host has sent a heartbeat."""
        await until(lambda: len(self._last) == len(self.names), seconds=600.0)

    def fall_silent(self, number: int) -> None:
        """Have the last ``number`` hosts stop."""
        self.silent = {name: self._last[name] for name in self.names[-number:]}


def act(pipe: Pipe, credentials: Credentials, names: list[str]) -> None:
    """Play hosts as the bench asks, until it closes the pipe."""

    async def play() -> None:
        hosts = Hosts(await Bus.open(credentials, service="learner"), names)
        beating = asyncio.create_task(hosts.beat())
        await hosts.join()
        await hosts.wait_for_beats()
        pipe.send(None)
        number = await asyncio.to_thread(pipe.recv)
        hosts.fall_silent(number)
        pipe.send((hosts.silent, hosts.most_late))
        await asyncio.to_thread(pipe.recv)
        beating.cancel()

    with suppress(EOFError):
        asyncio.run(play())


@contextmanager
def acting(credentials: Credentials, num_hosts: int) -> Iterator[list[Pipe]]:
    """Play ``num_hosts`` hosts in processes of their own; yield the pipes to these."""
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    for number in range(NUM_PROCESSES):
        ours, theirs = context.Pipe()
        names = [f"host-{index}" for index in range(number, num_hosts, NUM_PROCESSES)]
        process = context.Process(target=act, args=(theirs, credentials, names), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    try:
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()


@dataclass
class View:
    """What a watcher of the records sees."""

    up: set[str] = field(default_factory=set)
    lost: dict[str, float] = field(default_factory=dict)

    async def watch(self, bus: Bus) -> None:
        async for changes in bus.bucket(HOSTS).watch():
            for change in changes:
                if change.value is not None and change.value.state is HostState.LOST:
                    self.lost[change.key] = time.time()
                    self.up.discard(change.key)
                elif change.value is not None:
                    self.up.add(change.key)


@dataclass
class Measured:
    """What one run has shown."""

    joined_seconds: float
    processor: float
    memory_bytes: int
    lost_by_mistake: int
    seen_after: list[float]
    most_late: float
    """How late the bench itself beat at worst; beats may be this much more than a second apart."""


async def measure(server: NatsServer, num_hosts: int, seconds: float) -> Measured:
    """Have hosts join and beat, then some fall silent."""
    flags = ("--credentials", str(server.credentials("registry")), "--detection-seconds", str(DETECTION_SECONDS))
    registry = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "resile_registry", *flags, "--log-level", "warning"
    )
    view = View()
    bus = await Bus.open(_credentials(server, "monitor"), service="monitor")
    watching = asyncio.create_task(view.watch(bus))
    try:
        begun = time.monotonic()
        with acting(_credentials(server, "learner"), num_hosts) as pipes:
            await until(lambda: len(view.up) + len(view.lost) == num_hosts, seconds=600.0)
            joined_seconds = time.monotonic() - begun
            for pipe in pipes:
                await asyncio.to_thread(pipe.recv)
            process = psutil.Process(registry.pid)
            before, begun = sum(process.cpu_times()[:2]), time.monotonic()
            await asyncio.sleep(seconds)
            processor = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)
            by_mistake = set(view.lost)
            silent: dict[str, float] = {}
            most_late = 0.0
            for pipe in pipes:
                pipe.send(min(NUM_SILENT, num_hosts // 2) // NUM_PROCESSES)
                stopped, late = await asyncio.to_thread(pipe.recv)
                silent |= stopped
                most_late = max(most_late, late)
            await until(lambda: silent.keys() <= view.lost.keys(), seconds=60.0)
            return Measured(
                joined_seconds=joined_seconds,
                processor=processor,
                memory_bytes=process.memory_info().rss,
                lost_by_mistake=len(by_mistake | view.lost.keys() - silent.keys()),
                seen_after=[view.lost[name] - last for name, last in silent.items()],
                most_late=most_late,
            )
    finally:
        watching.cancel()
        await asyncio.wait({watching})
        await bus.close()
        registry.kill()
        await registry.wait()


def _credentials(server: NatsServer, role: str) -> Credentials:
    return read_credentials(server.credentials(role))


async def run(num_hosts: int, seconds: float) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "bus")
        await server.start()
        try:
            return await measure(server, num_hosts, seconds)
        finally:
            await server.stop()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--hosts", type=int, help="how many beat")
    parser.add_argument("--seconds", type=float, help="for how long, before some fall silent")
    options = parser.parse_args()
    num_hosts = options.hosts or options.length.pick(full=10_000, quick=2000, tiny=20)
    seconds = options.seconds or options.length.pick(full=60.0, quick=10.0, tiny=0.5)
    measured = asyncio.run(run(num_hosts, seconds))
    rows = [
        ("until all have joined", f"{measured.joined_seconds:.1f} s"),
        ("processor time of the registry", f"{measured.processor:.2f} of a core"),
        ("memory of the registry", f"{measured.memory_bytes / 2**20:.0f} MiB"),
        ("beats later than due, at worst", f"{measured.most_late:.2f} s"),
        ("a loss is seen after, median", f"{statistics.median(measured.seen_after):.2f} s"),
    ]
    print_table(f"{num_hosts} hosts, each beating once a second, for {seconds:g} s", ("", ""), rows)
    targets = (
        Target("hosts lost by mistake", measured.lost_by_mistake, 0.0),
        Target("a loss is seen after, at worst", max(measured.seen_after), DETECTION_SECONDS + MARGIN_SECONDS, "s"),
    )
    conclude(targets, options.length)


if __name__ == "__main__":
    main()
