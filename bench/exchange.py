"""How fast gradients are exchanged and state is transferred, against gloo, PCCL, and a bare socket.

Everything is measured in one run, in the same processes, the two sides taking turns, so that only the ratios matter:

    python bench/exchange.py            # 2, 4 and 8 workers, 1, 16 and 100 MB
    python bench/exchange.py --quick    # fewer repetitions
    python bench/exchange.py --tcp      # without shared memory
    python bench/exchange.py --only hosts

PCCL's column is there if its Python package is installed: the better of a whole tensor and of buckets.

As root also 4 workers on each of two hosts (network namespaces, with a link of 1 Gbit/s and of 100 Mbit/s between
them): folded by host, and flat. And 2 workers on each of four hosts, of which one has a link of 100 Mbit/s and the
others have 1 Gbit/s: with the sums divided among the fast hosts, and among all. And 2 workers on each of four hosts in
two racks, with 1 Gbit/s inside and less between the racks: folded by rack, and by host.

    python bench/exchange.py --tiny     # only tries every part
"""

import ctypes
import itertools
import math
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import namespaces
import pccl_peer
import torch
import torch.distributed as dist
from report import Target, argument_parser, conclude

from resile_learner.collectives.departure import LeaveAcknowledgement
from resile_learner.collectives.memory_agreement import MemoryAgreement
from resile_learner.collectives.poller import LinkPoller
from resile_learner.collectives.reduction import SharedMemory
from resile_learner.collectives.round import LinkRounds
from resile_learner.collectives.spec import RoundSpec, Tag
from resile_learner.collectives.state_transfer import StateTransfer
from resile_learner.collectives.status import NO_RACK, NOWHERE, find_host, rack_of
from resile_learner.collectives.transport import TcpTransport
from resile_learner.collectives.tree import pieces, ranges

MB = 1_000_000
SIZES_MB = (0.01, 1, 16, 100)
BARE_CHUNK_BYTES = 1 << 20
GIVE_UP_SECONDS = 600
FAST_MEGABITS, SLOW_MEGABITS = 1000, 100


@dataclass(frozen=True)
class Settings:
    """What one call measures."""

    sizes_mb: tuple[float, ...]
    bucket_mb: float
    seconds: float
    state_mb: int
    shares_memory: bool
    pccl_master: str | None = None
    """Its address; None: without PCCL."""
    hosts: tuple[str, ...] = ()
    """The namespaces that the workers run in, evenly many in each; here if there are none."""
    racks: tuple[int, ...] = ()
    """The rack of each of these."""
    other: str = ""
    """What else is measured between hosts: "evenly", sums divided evenly among all workers; "by host", without racks;
    else the flat exchange."""

    def host_of(self, rank: int, num_workers: int) -> int:
        """Which of them."""
        return rank * len(self.hosts) // num_workers

    def address_of(self, rank: int, num_workers: int) -> str:
        """Where a worker listens."""
        return namespaces.address(self.host_of(rank, num_workers)) if self.hosts else "127.0.0.1"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", help="numbers of processes (2 4 8)")
    parser.add_argument("--sizes", type=float, nargs="+", help="megabytes to reduce (0.01 1 16 100)")
    parser.add_argument("--bucket", type=float, default=4.0, help="megabytes in a bucket (4)")
    parser.add_argument("--state", type=int, help="megabytes of state to transfer (1200; 0: none)")
    parser.add_argument("--tcp", action="store_true", help="do not share memory")
    parser.add_argument("--only", choices=("host", "hosts"), help="on one host, or between several")
    parser.add_argument("--megabits", type=float, nargs="+", help="a second between two hosts (100 1000; 0: no limit)")
    arguments = parser.parse_args()
    length = arguments.length
    settings = Settings(
        sizes_mb=tuple(arguments.sizes or length.pick(full=SIZES_MB, quick=SIZES_MB, tiny=(0.01,))),
        bucket_mb=arguments.bucket,
        seconds=length.pick(full=6.0, quick=1.5, tiny=0.01),
        state_mb=arguments.state if arguments.state is not None else length.pick(full=1200, quick=300, tiny=4),
        shares_memory=not arguments.tcp,
    )
    targets = []
    if arguments.only != "hosts":
        numbers_of_workers = arguments.workers or length.pick(full=(2, 4, 8), quick=(2, 4, 8), tiny=(2,))
        targets += on_one_host(numbers_of_workers, settings)
    reason = namespaces.why_impossible()
    if arguments.only == "host":
        pass
    elif reason is not None:
        print(f"between two hosts: not measured, {reason}")
    else:
        sizes = tuple(arguments.sizes or length.pick(full=(1.0, 16.0), quick=(4.0,), tiny=(0.1,)))
        megabits = arguments.megabits or length.pick(full=(1000.0, 100.0), quick=(1000.0, 100.0), tiny=(1000.0,))
        settings = replace(settings, sizes_mb=sizes, state_mb=0)
        targets += between_hosts(megabits, 8, settings)
        targets += with_a_slow_host(8, settings)
        between = length.pick(full=(1000.0, 200.0, 100.0), quick=(1000.0, 100.0), tiny=(1000.0,))
        targets += between_racks(between, 8, settings)
    conclude(targets, length)


def on_one_host(numbers_of_workers: Sequence[int], settings: Settings) -> list[Target]:
    """By gloo, by PCCL where it is installed, and the state by a bare socket."""
    targets = []
    handover = None
    has_pccl = pccl_peer.is_installed()
    header = f"{'workers':>7} {'MB':>8} {'resile ms':>10} {'gloo ms':>10} {'ratio':>6}"
    print(header + (f" {'pccl ms':>10} {'ratio':>6}" if has_pccl else ""))
    for num_workers in numbers_of_workers:
        with (
            pccl_peer.master() if has_pccl else nullcontext() as pccl_master,
            processes(num_workers, replace(settings, pccl_master=pccl_master)) as first,
        ):
            for size in settings.sizes_mb:
                ours, gloo, *pccl = answer(first)
                of = f"{size:g} MB, {num_workers} workers"
                row = f"{num_workers:>7} {size:>8g} {ours * 1e3:>10.2f} {gloo * 1e3:>10.2f} {ours / gloo:>6.2f}"
                if pccl:
                    row += f" {min(pccl) * 1e3:>10.2f} {ours / min(pccl):>6.2f}"
                print(row, flush=True)
                if size >= 1 and settings.shares_memory:
                    targets.append(Target(f"{of}, by gloo", ours / gloo, 0.7 if num_workers == 2 else 0.5))
                    targets += [Target(f"{of}, by PCCL", ours / min(pccl), 1.0)] if pccl else []
            if num_workers == 2 and settings.state_mb:
                handover = answer(first)
    if handover is not None:
        rates = [settings.state_mb / 1000 / seconds for seconds in handover]
        print(
            f"state of {settings.state_mb} MB: {rates[0]:.2f} GB/s, bare socket {rates[1]:.2f} GB/s, "
            f"speed ratio {rates[0] / rates[1]:.2f}"
        )
    return targets


def between_hosts(megabits: Sequence[float], num_workers: int, settings: Settings) -> list[Target]:
    """Folded by host, by flat, by gloo."""
    targets = []
    print(f"\n{num_workers} workers on two hosts")
    print(f"{'Mbit/s':>7} {'MB':>8} {'by host ms':>10} {'flat ms':>10} {'gloo ms':>10} {'by flat':>7} {'by gloo':>7}")
    for rate in megabits:
        with (
            namespaces.connected_hosts([rate or None] * 2) as hosts,
            processes(num_workers, replace(settings, hosts=hosts)) as first,
        ):
            for size in settings.sizes_mb:
                ours, flat, gloo = answer(first)
                times = " ".join(f"{seconds * 1e3:>10.2f}" for seconds in (ours, flat, gloo))
                print(f"{rate:>7g} {size:>8g} {times} {ours / flat:>7.2f} {ours / gloo:>7.2f}", flush=True)
                if rate and size >= 1:
                    targets.append(Target(f"{size:g} MB at {rate:g} Mbit/s, by flat", ours / flat, 1 / 1.6))
    return targets


def with_a_slow_host(num_workers: int, settings: Settings) -> list[Target]:
    """By sums that are divided evenly, by gloo."""
    targets = []
    print(f"\n{num_workers} workers on four hosts, three with {FAST_MEGABITS} and one with {SLOW_MEGABITS} Mbit/s")
    print(f"{'MB':>8} {'resile ms':>10} {'evenly ms':>10} {'gloo ms':>10} {'by evenly':>9} {'by gloo':>7}")
    with (
        namespaces.connected_hosts([*[FAST_MEGABITS] * 3, SLOW_MEGABITS]) as hosts,
        processes(num_workers, replace(settings, hosts=hosts, other="evenly")) as first,
    ):
        for size in settings.sizes_mb:
            ours, evenly, gloo = answer(first)
            times = " ".join(f"{seconds * 1e3:>10.2f}" for seconds in (ours, evenly, gloo))
            print(f"{size:>8g} {times} {ours / evenly:>9.2f} {ours / gloo:>7.2f}", flush=True)
            if size >= 4:
                targets.append(Target(f"{size:g} MB with a slow host, by sums divided evenly", ours / evenly, 0.8))
    return targets


def between_racks(megabits: Sequence[float], num_workers: int, settings: Settings) -> list[Target]:
    """By what is folded by host, by gloo."""
    targets = []
    racks = (0, 0, 1, 1)
    print(f"\n{num_workers} workers on four hosts with {FAST_MEGABITS} Mbit/s, in two racks")
    print(f"{'Mbit/s':>7} {'MB':>8} {'resile ms':>10} {'by host ms':>10} {'gloo ms':>10} {'by host':>7} {'by gloo':>7}")
    for rate in megabits:
        with (
            namespaces.connected_hosts([FAST_MEGABITS] * 4, racks, between_racks=rate) as hosts,
            processes(num_workers, replace(settings, hosts=hosts, racks=racks, other="by host")) as first,
        ):
            for size in settings.sizes_mb:
                ours, by_host, gloo = answer(first)
                times = " ".join(f"{seconds * 1e3:>10.2f}" for seconds in (ours, by_host, gloo))
                print(f"{rate:>7g} {size:>8g} {times} {ours / by_host:>7.2f} {ours / gloo:>7.2f}", flush=True)
                if size >= 4 and rate < FAST_MEGABITS:
                    name = f"{size:g} MB at {rate:g} Mbit/s between racks, by what is folded by host"
                    targets.append(Target(name, ours / by_host, 0.7))
    return targets


def answer(first: Connection) -> tuple[float, ...]:
    if not first.poll(GIVE_UP_SECONDS):
        sys.exit("the workers do not answer")
    medians: tuple[float, ...] = first.recv()
    return medians


@contextmanager
def processes(num_workers: int, settings: Settings) -> Iterator[Connection]:
    """Runs ``measure`` in as many processes; they end with this block, and with this process in any case."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(num_workers)]
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            spawn.Process(
                target=measure, args=(rank, num_workers, there, f"{folder}/store", settings, os.getpid()), daemon=True
            )
            for rank, (_, there) in enumerate(pipes)
        ]
        try:
            for worker in workers:
                worker.start()
            for _, there in pipes:
                there.close()
            for _ in range(3 if settings.hosts else 2):
                ports = [here.recv() for here, _ in pipes]
                for here, _ in pipes:
                    here.send(ports)
            yield pipes[0][0]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()


def die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def measure(rank: int, num_workers: int, pipe: Connection, store: str, settings: Settings, parent: int) -> None:
    """What each process runs; the first one sends the medians of each comparison into its pipe."""
    die_with(parent)
    torch.set_num_threads(1)
    if settings.hosts:
        namespaces.enter(settings.hosts[settings.host_of(rank, num_workers)])
        os.environ["GLOO_SOCKET_IFNAME"] = namespaces.INTERFACE
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    addresses = [settings.address_of(other, num_workers) for other in range(num_workers)]
    poller = poller_of(connect(rank, addresses, pipe))
    bare = connect(rank, addresses, pipe)
    here = find_host()
    if settings.hosts:
        here = here._replace(kernel=here.network)  # else two namespaces are two containers of one host
    rack = rack_of([str(settings.racks[settings.host_of(rank, num_workers)])]) if settings.racks else NO_RACK
    agreement = MemoryAgreement(rank, host=here if settings.shares_memory else NOWHERE, rack=rack, report=print)
    exchanges = [LinkRounds(poller, rank, agreement)]
    if settings.hosts:
        others = {"evenly": EvenlyDivided, "by host": MemoryAgreement}
        other = others[settings.other](rank, host=here) if settings.other else None
        exchanges.append(LinkRounds(poller_of(connect(rank, addresses, pipe)), rank, other))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_workers)
    tags = (Tag(1, number) for number in itertools.count())
    peer = pccl_peer.Peer(settings.pccl_master, num_workers) if settings.pccl_master else None
    for size in settings.sizes_mb:
        pipe.send(reduce_by_all(exchanges, tags, num_workers, size, settings, peer))
    if num_workers == 2 and settings.state_mb:
        pipe.send(transfer_both(poller, rank, tags, bare[1 - rank], settings))
    signal.pause()


class EvenlyDivided(MemoryAgreement):
    """Lets all members own as many blocks, whatever their links carry."""

    def begin(self, spec: RoundSpec) -> SharedMemory:
        memory = super().begin(spec)
        return SharedMemory(memory.sharing._replace(owners=()), memory.segments)


def poller_of(sockets: Mapping[int, socket.socket]) -> LinkPoller:
    poller = LinkPoller()
    for peer, sock in sockets.items():
        poller.add(peer, TcpTransport(sock))
    return poller


def connect(rank: int, addresses: Sequence[str], pipe: Connection) -> dict[int, socket.socket]:
    """A connection to every other process."""
    with socket.create_server((addresses[rank], 0), backlog=len(addresses)) as listener:
        pipe.send(listener.getsockname()[1])
        ports = pipe.recv()
        links: dict[int, socket.socket] = {}
        for peer in range(rank):
            links[peer] = socket.create_connection((addresses[peer], ports[peer]))
            links[peer].send(bytes([rank]))
        while len(links) < len(addresses) - 1:
            sock, _ = listener.accept()
            links[sock.recv(1)[0]] = sock
    return links


def alternate(actions: tuple[Callable[[], object], ...], seconds: float) -> tuple[float, ...]:
    """The median over repetitions of each action's time, that of the slowest process."""

    def timed(action: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    def slowest(times: list[list[float]]) -> list[list[float]]:
        together = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
        return together.tolist()

    estimate = [[timed(action) for action in actions] for _ in range(3)][1:]
    rounds = math.ceil(seconds / min(map(sum, slowest(estimate))))
    times = slowest([[timed(action) for action in actions] for _ in range(min(max(rounds, 5), 300))])
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def reduce_by_all(
    exchanges: Sequence[LinkRounds],
    tags: Iterator[Tag],
    num_workers: int,
    size_mb: float,
    settings: Settings,
    peer: pccl_peer.Peer | None,
) -> tuple[float, ...]:
    """All-reduce of float32 values with one shard a worker: buckets by each exchange, one tensor by gloo.

    Where there is a ``peer`` also one tensor by PCCL, and buckets by PCCL.
    """
    # Zeros stay zeros however often they are summed.
    values = torch.empty(round(size_mb * MB) // 4).fill_(0.0)
    other = values.clone()
    buckets = values.split(round(settings.bucket_mb * MB) // 4)
    held = tuple(pieces(num_workers, leaf) for leaf in ranges(num_workers, num_workers))
    members = tuple(range(num_workers))

    def by(exchange: LinkRounds) -> None:
        spec = RoundSpec(next(tags), members, held, num_workers, [[bucket] for bucket in buckets], buckets)
        open_round = exchange.begin(spec)
        for bucket in range(len(buckets)):
            open_round.push(bucket)
        open_round.finish(b"")

    ours = [partial(by, exchange) for exchange in exchanges]
    pccl = ()
    if peer is not None:
        parts = other.split(len(buckets[0]))
        pccl = partial(peer.all_reduce, other), partial(peer.all_reduce_buckets, parts)
    return alternate((*ours, lambda: dist.all_reduce(other), *pccl), settings.seconds)


def transfer_both(
    poller: LinkPoller, rank: int, tags: Iterator[Tag], bare: socket.socket, settings: Settings
) -> tuple[float, ...]:
    """The state of process 0 to process 1: as tensors over a link, and as bytes copied over a plain socket."""
    transfer, acknowledgement = StateTransfer(poller, rank), LeaveAcknowledgement(poller)
    tensors = [torch.empty(settings.state_mb * MB // 4 // 20).fill_(0.0) for _ in range(20)]
    memory = [memoryview(tensor.numpy()).cast("B") for tensor in tensors]
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ours() -> None:
        if rank == 0:
            transfer.send(1, 1, b"", tensors)
            acknowledgement.await_confirmations([1], next(tags))
        else:
            transfer.receive(lambda _: tensors)
            acknowledgement.confirm(0, next(tags))

    def plain() -> None:
        if rank == 0:
            for view in memory:
                bare.sendall(view)
            bare.recv(1)
        else:
            for view in memory:
                received = 0
                while received < len(view):
                    received += bare.recv_into(view[received : received + BARE_CHUNK_BYTES])
            bare.send(b"!")

    return alternate((ours, plain), settings.seconds)


if __name__ == "__main__":
    main()
