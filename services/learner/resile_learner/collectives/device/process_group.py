"""Process groups of torch.distributed, without a global one; no other module calls the library.

A group belongs to one thread, except for ``abort``. Gloo has no abort of its own that frees a waiting thread
(``ProcessGroupGloo.abort`` of torch 2.13 frees none). But an operation that exceeds its own timeout closes all
connections of its process group, and that ends every wait of this process at once; peers that wait for this process
see the closed connections. So ``GlooGroup.abort`` starts a receive that nobody answers, with a timeout of 1 ms. Now
and then gloo forgets to wake a wait whose connection has just closed; that thread is left to end by its own timeout.
It no longer touches any memory, so training can continue.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Store

Operand = tuple[int, Tensor]
"""A peer and the contiguous tensor that is sent to it or received from it."""

_UNANSWERED_TAG = 1 << 30
GLOO_TIMEOUT = timedelta(minutes=2)
"""Timeout of an operation, including the time in which members still compute."""
_AT_ONCE = timedelta(milliseconds=1)


class DeviceGroup(Protocol):
    """What moves bytes between the devices of a generation.

    The methods raise RuntimeError when a peer or the library fails. What they have moved is in place for what follows
    on the current stream.
    """

    rank: int

    @property
    def has_released_memory(self) -> bool:
        """After ``abort``: whether a call that has not returned yet no longer uses its tensors."""

    def send_receive(self, sends: Sequence[Operand], receives: Sequence[Operand]) -> None:
        """Send and receive at once. What two ranks send each other has the same order on both."""

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Fill ``whole`` with the equal parts of all ranks in rank order; ``own`` is a view of this rank's part."""

    def error(self) -> str:
        """Why operations for which the device still waits have failed; empty if none has. From any thread."""

    def abort(self) -> None:
        """End all operations of this process, now and later. From any thread, and without waiting for a peer.

        Work that is queued on the device behind them still runs, on whatever data they have left.
        """


class GlooGroup:
    """Implements ``DeviceGroup`` with gloo, for tensors in CPU memory. The calls wait until the bytes are moved."""

    def __init__(self, store: Store, *, rank: int, size: int, host: str, forming: timedelta) -> None:
        gloo: Any = dist.ProcessGroupGloo  # its stubs lack most of it
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host)]
        options._timeout = forming
        self.rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._store = store  # the library calls its methods
        self._group = gloo(store, rank, size, options)
        self._is_waiting = self._is_aborted = False

    @property
    def has_released_memory(self) -> bool:
        """See ``DeviceGroup``."""
        return self._is_aborted and self._is_waiting

    def send_receive(self, sends: Sequence[Operand], receives: Sequence[Operand]) -> None:
        """See ``DeviceGroup``."""
        works = [self._group.recv([data], peer, tag) for peer, data, tag in _tagged(receives)]
        works += [self._group.send([data], peer, tag) for peer, data, tag in _tagged(sends)]
        self._wait_for(works)

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """See ``DeviceGroup``."""
        options = AllgatherOptions()
        options.timeout = GLOO_TIMEOUT
        self._wait_for([self._group._allgather_base(_bytes(whole), _bytes(own), options)])

    def _wait_for(self, works: Sequence[dist.Work]) -> None:
        self._is_waiting = True
        try:
            for work in works:
                work.wait(GLOO_TIMEOUT)
        finally:
            self._is_waiting = False
        if self._is_aborted:
            raise RuntimeError("the process group was aborted")

    def error(self) -> str:
        """See ``DeviceGroup``. Always empty: the calls wait for the operations and raise their errors."""
        return ""

    def abort(self) -> None:
        """See ``DeviceGroup``."""
        self._is_aborted = True
        for peer in self._peers:  # a connection that is closed already raises at once, and ends nothing
            with suppress(RuntimeError):
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                self._group.recv([nothing], peer, _UNANSWERED_TAG).wait(_AT_ONCE)


class NcclGroup:
    """Implements ``DeviceGroup`` with NCCL, for tensors on ``device``. The calls return once all is queued there."""

    def __init__(self, store: Store, *, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
            os.environ[name] = "0"  # else a thread of the library ends this process when a peer is lost
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self.rank = rank
        self._store = store
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        self._last: dist.Work | None = None
        self._group.eager_connect_single_device(device)

    @property
    def has_released_memory(self) -> bool:
        """See ``DeviceGroup``. The calls return at once; ``SideStream.drain`` waits for what they have queued."""
        return False

    def send_receive(self, sends: Sequence[Operand], receives: Sequence[Operand]) -> None:
        """See ``DeviceGroup``."""
        if not sends and not receives:
            return
        self._group._start_coalescing()
        for peer, data in receives:
            self._group.recv([_bytes(data)], peer, 0)
        for peer, data in sends:
            self._group.send([_bytes(data)], peer, 0)
        self._queue(self._group._end_coalescing())

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """See ``DeviceGroup``."""
        self._queue(self._group._allgather_base(_bytes(whole), _bytes(own)))

    def _queue(self, work: dist.Work) -> None:
        """Let what follows on the current stream wait for an operation."""
        self._last = work
        work.wait()

    def error(self) -> str:
        """See ``DeviceGroup``. Errors are those of the communicator, so the last operation has them all."""
        work = self._last
        failure = work.exception() if work is not None and work.is_completed() else None
        return str(failure or "")

    def abort(self) -> None:
        """See ``DeviceGroup``."""
        self._group.abort()


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: no backend supports all dtypes."""
    return tensor.view(torch.uint8)


def _tagged(operands: Iterable[Operand]) -> list[tuple[int, Tensor, int]]:
    """Tag each operand with its number among those of its peer, which is the same on both sides."""
    numbers: dict[int, int] = {}
    tagged = []
    for peer, data in operands:
        numbers[peer] = numbers.get(peer, -1) + 1
        tagged.append((peer, _bytes(data), numbers[peer]))
    return tagged
