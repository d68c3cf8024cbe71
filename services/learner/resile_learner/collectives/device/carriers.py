"""How the sums of one round travel: over links, over links by way of the host's memory, or from device to device.

While the devices exchange, the main thread waits for links, and the communicator's thread wakes it. When a member is
lost, its link breaks, and the communicator is abandoned together with the round.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from resile_shared.errors import ResileError

from ...streams import SideStream, has_streams
from ..poller import LinkPoller
from ..round import LinkRound
from ..spec import RoundSpec
from .bucket_plan import plan_bucket
from .communicator import Communicator, Condition
from .communicators import OPERATION_SECONDS
from .process_group import DeviceGroup
from .summing import Rows, sum_bucket

ABORT_SECONDS = 60.0
CHECK_SECONDS = 1.0
"""Seconds between two checks for errors of the library while the main thread waits for the device."""
COPY_SECONDS = 0.001
"""Seconds between two checks whether a copy to the host is complete."""


class DeviceStatus(IntEnum):
    """What a member reports in its header about its device."""

    NOT_READY = 0
    READY = 1
    FAILED = 2
    """The member could not complete its part of the sums of this round."""


class DeviceStuck(ResileError):
    """The device still uses the memory of a round that was abandoned, so that this worker cannot continue."""

    def __init__(self) -> None:
        super().__init__(
            f"the exchange on the device did not end within {ABORT_SECONDS:g} s after it was aborted: another worker "
            "takes this one's place. Look for errors of the driver (Xid) in the system's log"
        )


class Carrier(ABC):
    """How the sums of one round travel."""

    @abstractmethod
    def push(self, bucket: int) -> None:
        """Start to sum a bucket whose partial sums are final."""

    def path(self, inner: LinkRound) -> str:
        """Human-readable description of how the sums travel."""
        return inner.path

    def settle(self, inner: LinkRound) -> str:
        """Before the header is sent: complete what does not travel over TCP; return why that failed, if it did."""
        return ""

    def complete(self) -> None:  # noqa: B027
        """Put the sums where they are expected: the round is complete."""

    def abandon(self) -> None:  # noqa: B027
        """Stop using the memory of the round: it has no result."""


class Staging:
    """Pinned memory for tensors on a device, kept as long as they live."""

    def __init__(self) -> None:
        self._hosts = WeakIdKeyDictionary()

    def stage(self, spec: RoundSpec) -> RoundSpec:
        """The same round over the copies; nothing is copied yet."""
        partials = [[self._host(partial) for partial in bucket] for bucket in spec.partials]
        return replace(spec, partials=partials, sums=[self._host(sums) for sums in spec.sums])

    def _host(self, tensor: Tensor) -> Tensor:
        if tensor not in self._hosts:
            pinned = has_streams(tensor.device)
            self._hosts[tensor] = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        return self._hosts[tensor]  # type: ignore[no-any-return]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, and wait for all of them."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    for device in {tensor.device for tensor in (*targets, *sources) if has_streams(tensor.device)}:
        torch.accelerator.current_stream(device).synchronize()


class OverLinks(Carrier):
    """Sums in CPU memory, over the links."""

    def __init__(self, inner: LinkRound) -> None:
        self._inner = inner

    def push(self, bucket: int) -> None:
        """See ``Carrier.push``."""
        self._inner.push(bucket)


class Staged(OverLinks):
    """Sums on a device, over the links: copied to the host and back.

    A hook that pushes a bucket does not wait for the device: the bucket goes out from a later hook, or at the end.
    """

    def __init__(self, inner: LinkRound, spec: RoundSpec, staged: RoundSpec, stream: SideStream) -> None:
        super().__init__(inner)
        self._spec = spec
        self._hosts = staged
        self._stream = stream
        self._copying: deque[tuple[int, torch.Event | None]] = deque()
        """Buckets that are being copied to the host, in order, each with the event of its copy; None: it is done."""

    def path(self, inner: LinkRound) -> str:
        """See ``Carrier.path``."""
        return f"copied from the devices; {inner.path}"

    def push(self, bucket: int) -> None:
        """See ``Carrier.push``."""
        copied = self._stream.copy(self._hosts.partials[bucket], self._spec.partials[bucket])
        self._copying.append((bucket, copied))
        self._push_copied()

    def settle(self, inner: LinkRound) -> str:
        """See ``Carrier.settle``."""
        while self._copying:
            inner.progress_until(self._is_next_copied, seconds=COPY_SECONDS)
            self._push_copied()
        return ""

    def _is_next_copied(self) -> bool:
        _, copied = self._copying[0]
        return copied is None or copied.query()

    def _push_copied(self) -> None:
        while self._copying and self._is_next_copied():
            super().push(self._copying.popleft()[0])

    def complete(self) -> None:
        """See ``Carrier.complete``."""
        copy_all(self._spec.sums, self._hosts.sums)

    def abandon(self) -> None:
        """See ``Carrier.abandon``."""
        if not self._stream.drain(ABORT_SECONDS):
            raise DeviceStuck


class Alone(Carrier):
    """Sums of a single member, which holds all: nothing travels."""

    def __init__(self, spec: RoundSpec) -> None:
        self._spec = spec

    def push(self, bucket: int) -> None:
        """See ``Carrier.push``."""
        (whole,), sums = self._spec.partials[bucket], self._spec.sums[bucket]
        if whole is not sums:
            sums.copy_(whole)


class OnDevices(Carrier):
    """Sums from device to device, by the communicator's thread."""

    def __init__(
        self, spec: RoundSpec, communicator: Communicator, poller: LinkPoller, stream: SideStream, rows: Rows
    ) -> None:
        self._spec = spec
        self._communicator = communicator
        self._poller = poller
        self._stream = stream
        self._rows = rows
        self._num_pushed = 0
        self._num_summed = 0

    def path(self, inner: LinkRound) -> str:
        """See ``Carrier.path``."""
        return "from device to device"

    def push(self, bucket: int) -> None:
        """See ``Carrier.push``."""
        if bucket != self._num_pushed:
            raise ValueError(f"bucket {bucket} pushed when {self._num_pushed} is next")
        self._num_pushed += 1
        self._communicator.submit(partial(self._sum, bucket, self._stream.mark()))

    def _sum(self, bucket: int, ready: torch.Event | None, group: DeviceGroup) -> None:
        spec = self._spec
        sums = spec.sums[bucket]
        rank = group.rank
        plan = plan_bucket(spec.pieces, spec.num_leaves, sums.numel(), sums.element_size(), rank)
        with self._stream.after(ready):
            is_maximum = bucket in spec.maxima
            sum_bucket(plan, spec.partials[bucket], sums, group, self._rows, is_maximum=is_maximum)
        if bucket == len(spec.sums) - 1:
            self._stream.wait()
            if self._communicator.condition is Condition.ENDED:  # an abort ends the wait, too
                raise RuntimeError(self._communicator.reason)
        self._num_summed += 1

    def settle(self, inner: LinkRound) -> str:
        """See ``Carrier.settle``."""
        if self._num_pushed != len(self._spec.sums):
            raise ValueError(f"finished with {self._num_pushed} of {len(self._spec.sums)} buckets pushed")
        deadline = time.monotonic() + OPERATION_SECONDS

        def is_settled() -> bool:
            is_done = self._num_summed == self._num_pushed or self._communicator.condition is Condition.ENDED
            return is_done or self._has_peer_failed(inner) or time.monotonic() > deadline

        while not is_settled():
            inner.progress_until(is_settled, seconds=CHECK_SECONDS)
            self._communicator.check()
        if self._num_summed == self._num_pushed:
            return ""
        reason = self._communicator.reason or (
            "the exchange failed at another worker"
            if self._has_peer_failed(inner)
            else f"the devices did not complete a round within {OPERATION_SECONDS:g} s"
        )
        self.abandon()
        return reason

    def _has_peer_failed(self, inner: LinkRound) -> bool:
        return any(header[0] == DeviceStatus.FAILED for header in inner.received)

    def abandon(self) -> None:
        """See ``Carrier.abandon``."""
        self._communicator.abandon("a round was abandoned")
        if not (self._communicator.await_end(ABORT_SECONDS) and self._stream.drain(ABORT_SECONDS)):
            raise DeviceStuck
