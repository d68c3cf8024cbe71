"""The communicators of one worker, by generation: formed in the background, abandoned when no longer needed.

`exchange_device` decides whether a job has any.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import Store

from ...streams import SideStream
from .communicator import Communicator, Condition, Task
from .peer_store import Board, PeerStore
from .process_group import DeviceGroup, GlooGroup, NcclGroup

FORMING_SECONDS = 60.0
OPERATION_SECONDS = 600.0
"""Seconds that the devices may take for a round, including the time in which members still compute."""
MAX_BOARDS = 16
"""The entries of at most this many generations, the newest ones, are kept."""

Send = Callable[[Collection[int], int, str, bytes], None]
"""Sends an entry to workers; the arguments are the workers, the generation, the key and the value."""
Workers = tuple[int, ...]
VARIABLE = "RESILE_DEVICE_EXCHANGE"
"""Variable in a job's environment. ``off``: gradients on devices travel over TCP. ``gloo``: those in CPU memory travel
over gloo, to test the exchange on devices where there are none."""
CPU = torch.device("cpu")


class Communicators:
    """The communicators of ``worker``, which listens on ``host``. From any thread.

    ``notify`` is called when a communicator has formed, has ended, or has completed a task.
    """

    def __init__(self, worker: int, *, host: str, send: Send, notify: Callable[[], None]) -> None:
        self.device: torch.device | None = None
        """The device of the gradients; None: the sums do not travel from device to device."""
        self._worker = worker
        self._host = host
        self._send = send
        self._notify = notify
        self._lock = threading.Lock()
        self._boards: dict[int, Board] = {}
        self._wanted: dict[int, Workers] = {}
        self._formed: dict[int, Communicator] = {}
        self._oldest = 0
        """No generation before this one will be wanted any more, and entries of older ones are dropped."""

    def enable(self, device: torch.device) -> None:
        """From now on form the communicators that are wanted, for gradients on ``device``."""
        self.device = device
        self.want(self._wanted)

    def want(self, wanted: Mapping[int, Workers]) -> None:
        """Keep a communicator for each of these generations of this worker, by number, and for no other."""
        with self._lock:
            self._wanted = {generation: workers for generation, workers in wanted.items() if len(workers) > 1}
            ended = [generation for generation in self._formed if generation not in self._wanted]
            dropped = [self._formed.pop(generation) for generation in ended]
            self._oldest = max(self._oldest, min(self._wanted, default=0))
            self._boards = {number: board for number, board in self._boards.items() if number >= self._oldest}
            if self.device is not None:
                for generation in self._wanted.keys() - self._formed.keys():
                    self._formed[generation] = self._form(generation, self._wanted[generation], self.device)
        for communicator in dropped:
            communicator.abandon("its generation is over")

    def of(self, generation: int) -> Communicator | None:
        """The communicator of a generation that is wanted and has several members."""
        return self._formed.get(generation)

    def is_settled(self, generation: int) -> bool:
        """Whether there is nothing to wait for: the communicator has formed, or never will."""
        communicator = self.of(generation)
        return communicator is None or communicator.condition is not Condition.FORMING

    def receive(self, generation: int, key: str, value: bytes) -> None:
        """Store an entry of another member, which may arrive before this worker wants the generation."""
        with self._lock:
            if generation >= self._oldest:
                self._board(generation).put(key, value)

    def close(self) -> None:
        """Abandon all communicators."""
        self.want({})

    def _form(self, generation: int, workers: Workers, device: torch.device) -> Communicator:
        board = self._board(generation)
        others = [worker for worker in workers if worker != self._worker]
        timeout = timedelta(seconds=FORMING_SECONDS)
        store = PeerStore(board, partial(self._send, others, generation), timeout=timeout)
        rank = workers.index(self._worker)
        form = partial(connect, store=store, rank=rank, size=len(workers), host=self._host, device=device)
        name = f"generation-{generation}"
        return Communicator(name, form, self._notify, forming_seconds=FORMING_SECONDS, give_up=store.close)

    def _board(self, generation: int) -> Board:
        if generation not in self._boards:
            self._boards[generation] = Board()
            for oldest in sorted(self._boards)[:-MAX_BOARDS]:
                del self._boards[oldest]
        return self._boards[generation]


def connect(on_group: Task, *, store: Store, rank: int, size: int, host: str, device: torch.device) -> DeviceGroup:
    """Form the process group for tensors on ``device``, pass it to ``on_group``, and move test data between all ranks.

    This uses a stream of its own, so that the compute of the old generation continues meanwhile.
    Raises RuntimeError or TimeoutError.
    """
    group: DeviceGroup
    if device.type == "cuda":
        group = NcclGroup(store, rank=rank, size=size, device=device, timeout=timedelta(seconds=OPERATION_SECONDS))
    else:
        group = GlooGroup(store, rank=rank, size=size, host=host, forming=timedelta(seconds=FORMING_SECONDS))
    on_group(group)
    with SideStream(device).after(None):
        _probe(group, size, device)
    return group


def _probe(group: DeviceGroup, size: int, device: torch.device) -> None:
    probe = torch.zeros(size, dtype=torch.uint8, device=device)
    own = torch.ones(1, dtype=torch.uint8, device=device)
    rank = group.rank
    others = [peer for peer in range(size) if peer != rank]
    group.send_receive([(peer, own) for peer in others], [(peer, probe[peer : peer + 1]) for peer in others])
    group.gather(probe, probe[rank : rank + 1].fill_(1))
    if int(probe.sum()) != size:
        raise RuntimeError("the devices moved other bytes than those that were sent")


def exchange_device(devices: Collection[torch.device], environment: Mapping[str, str]) -> torch.device | None:
    """Return the device of parameters on ``devices`` if sums travel from there; None: they travel over TCP.

    A worker whose parameters are on several devices exchanges over TCP.
    """
    choice = environment.get(VARIABLE, "")
    if len(devices) != 1 or choice == "off":
        return None
    (device,) = devices
    return device if device.type == "cuda" or (device == CPU and choice == "gloo") else None
