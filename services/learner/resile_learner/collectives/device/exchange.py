"""The exchange of a worker: headers and membership over TCP, sums over the devices where all members can.

Every header begins with a status of one byte. All members have all statuses when a round is complete, and so decide
alike: the sums of a generation travel over TCP until every member has said in one round that its communicator is
formed, and on the devices from the next round on. A member completes its part on the device before it sends its header,
whose status says whether that succeeded. If it failed for any member, none commits: all raise `Repeated`, repeat the
round, and use TCP for the rest of the generation.

While the devices exchange, the main thread waits for links, and the communicator's thread wakes it. When a member is
lost, its link breaks, and the communicator is abandoned together with the round.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial

import torch

from resile_shared.errors import ResileError

from ...streams import SideStream
from ..poller import LinkPoller
from ..round import LinkExchange, LinkRound
from ..spec import Repeated, RoundSpec
from .communicator import Communicator, Condition
from .communicators import OPERATION_SECONDS, Communicators, Workers
from .plan import plan_bucket
from .process_group import DeviceGroup
from .selection import CPU
from .staging import Staging, copy_all
from .summing import Rows, sum_bucket

ABORT_SECONDS = 60.0
CHECK_SECONDS = 1.0
"""Seconds between two checks for errors of the library while the main thread waits for the device."""
COPY_SECONDS = 0.001
"""Seconds between two checks whether a copy to the host is complete."""
Key = tuple[int, Workers]


class Status(IntEnum):
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


class DeviceExchange:
    """Opens the rounds of ``worker``. For the main thread. ``report`` gets each reason not to use the devices once."""

    def __init__(
        self,
        poller: LinkPoller,
        exchange: LinkExchange,
        communicators: Communicators | None = None,
        report: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._poller = poller
        self._exchange = exchange
        self._communicators = communicators
        self._report = report
        self._reported: set[str] = set()
        self.reason = ""
        """Why the sums of this generation travel over TCP; empty if they do not, or if another member is the reason."""
        self._staging = Staging()
        self._rows = Rows()
        self._stream: SideStream | None = None
        self._key: Key | None = None
        self._uses_devices = False
        """Whether the next round of this generation sums on the devices."""
        self._has_failed = False
        self._open: ExchangeRound | None = None

    def needs_agreement(self, key: Key) -> bool:
        """Whether the members of this generation have yet to say in a round whether their communicators are formed."""
        return self._communicator(key) is not None and key != self._key

    def begin(self, spec: RoundSpec) -> "ExchangeRound":
        """Open the next round. At most one is open at a time: one that was left unfinished is abandoned."""
        if self._open is not None:
            self._open.abandon()
        key = spec.tag.generation, spec.members
        if key != self._key:
            self._key, self._uses_devices, self._has_failed, self.reason = key, False, False, ""
        self._open = ExchangeRound(self, *self._carry(spec, self._communicator(key)))
        return self._open

    def _communicator(self, key: Key) -> Communicator | None:
        return self._communicators.of(key[0]) if self._communicators else None

    def _carry(self, spec: RoundSpec, communicator: Communicator | None) -> tuple[LinkRound, Carrier]:
        devices = {sums.device for sums in spec.sums}
        if self._uses_devices and self._communicators and communicator and devices == {self._communicators.device}:
            inner = self._exchange.begin(spec.without_sums())
            return inner, _OnDevices(spec, communicator, self._poller, self._stream_of(spec), self._rows)
        if devices <= {CPU}:
            inner = self._exchange.begin(spec)
            return inner, _OverTcp(inner)
        if len(spec.members) == 1:
            return self._exchange.begin(spec.without_sums()), _Alone(spec)
        staged = self._staging.stage(spec)
        inner = self._exchange.begin(staged)
        return inner, _Staged(inner, spec, staged, self._stream_of(spec))

    def _stream_of(self, spec: RoundSpec) -> SideStream:
        if self._stream is None:
            self._stream = SideStream(spec.sums[0].device)
        return self._stream

    def status(self) -> Status:
        """The status to report in the header of a round that has not failed."""
        communicator = self._communicator(self._key) if self._key else None
        if communicator is None or self._has_failed:
            return Status.NOT_READY
        if communicator.condition is Condition.ENDED:
            self.report(communicator.reason)
        return Status.READY if communicator.condition is Condition.READY else Status.NOT_READY

    def on_statuses(self, statuses: Sequence[int], members: Workers, failure: str) -> None:
        """Process the statuses of a complete round. Raises Repeated if a member, maybe this one, has failed in it."""
        failed = [worker for worker, status in zip(members, statuses, strict=True) if status == Status.FAILED]
        self._has_failed = self._has_failed or bool(failed)
        self._uses_devices = not self._has_failed and all(status == Status.READY for status in statuses)
        if failed:
            if failure:
                self.report(failure)
            raise Repeated(failed)

    def report(self, reason: str) -> None:
        """Record, and report once, why the sums of this generation travel over TCP."""
        self.reason = reason
        if reason not in self._reported:
            self._reported.add(reason)
            self._report(f"the workers exchange gradients over TCP, and not from device to device: {reason}")


class ExchangeRound:
    """A round under way: see `LinkRound`, whose methods it has."""

    def __init__(self, exchange: DeviceExchange, inner: LinkRound, carrier: Carrier) -> None:
        self._exchange = exchange
        self._inner = inner
        self._carrier = carrier
        self._is_finished = False
        self.path = carrier.path(inner) + (f"; not from device to device: {exchange.reason}" if exchange.reason else "")
        """Human-readable description of how gradients are exchanged."""

    @property
    def rank(self) -> int:
        """See ``LinkRound.rank``."""
        return self._inner.rank

    @property
    def last(self) -> tuple[int, float]:
        """See ``LinkRound.last``."""
        return self._inner.last

    @property
    def missing(self) -> tuple[int, ...]:
        """See ``LinkRound.missing``."""
        return self._inner.missing

    def push(self, bucket: int) -> None:
        """See ``LinkRound.push``."""
        self._carrier.push(bucket)

    def finish(self, header: bytes, *, may_leave: bool = False) -> tuple[bytes, ...]:
        """See ``LinkRound.finish``. Raises Repeated when the devices have failed and no member is lost."""
        try:
            failure = self._carrier.settle(self._inner)
            status = Status.FAILED if failure else self._exchange.status()
            headers = self._inner.finish(bytes([status]) + header, may_leave=may_leave)
            self._exchange.on_statuses([each[0] for each in headers], self._inner.members, failure)
        except BaseException:
            self.abandon()
            raise
        self._is_finished = True
        self._carrier.complete()
        return tuple(each[1:] for each in headers)

    def withdraw(self) -> None:
        """See ``LinkRound.withdraw``."""
        self._is_finished = True
        self._inner.withdraw()

    def abandon(self) -> None:
        """Stop using the memory of this round, if it is not finished. Raises DeviceStuck."""
        if not self._is_finished:
            self._is_finished = True
            self._carrier.abandon()


class _OverTcp(Carrier):
    """Sums in CPU memory, over the links."""

    def __init__(self, inner: LinkRound) -> None:
        self._inner = inner

    def push(self, bucket: int) -> None:
        self._inner.push(bucket)


class _Staged(_OverTcp):
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
        copied = self._stream.copy(self._hosts.partials[bucket], self._spec.partials[bucket])
        self._copying.append((bucket, copied))
        self._push_copied()

    def settle(self, inner: LinkRound) -> str:
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
        copy_all(self._spec.sums, self._hosts.sums)

    def abandon(self) -> None:
        if not self._stream.drain(ABORT_SECONDS):
            raise DeviceStuck


class _Alone(Carrier):
    """Sums of a single member, which holds all: nothing travels."""

    def __init__(self, spec: RoundSpec) -> None:
        self._spec = spec

    def push(self, bucket: int) -> None:
        (whole,), sums = self._spec.partials[bucket], self._spec.sums[bucket]
        if whole is not sums:
            sums.copy_(whole)


class _OnDevices(Carrier):
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
        return any(header[0] == Status.FAILED for header in inner.received)

    def abandon(self) -> None:
        self._communicator.abandon("a round was abandoned")
        if not (self._communicator.await_end(ABORT_SECONDS) and self._stream.drain(ABORT_SECONDS)):
            raise DeviceStuck
