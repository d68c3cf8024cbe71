"""The exchange of a worker: headers and membership over TCP, sums over the devices where all members can.

Every header begins with a status of one byte. All members have all statuses when a round is complete, and so decide
alike: the sums of a generation travel over TCP until every member has said in one round that its communicator is
formed, and on the devices from the next round on. A member completes its part on the device before it sends its header,
whose status says whether that succeeded. If it failed for any member, none commits: all raise `Repeated`, repeat the
round, and use TCP for the rest of the generation.
"""

from collections.abc import Callable, Sequence

from ..streams import SideStream
from .device.carriers import Alone, Carrier, DeviceStatus, OnDevices, OverLinks, Staged, Staging
from .device.communicator import Communicator, Condition
from .device.communicators import CPU, Communicators, Workers
from .device.summing import Rows
from .poller import LinkPoller
from .round import LinkRound, LinkRounds
from .spec import Repeated, RoundSpec

Key = tuple[int, Workers]


class Exchange:
    """Opens the rounds of ``worker``. For the main thread. ``report`` gets each reason not to use the devices once."""

    def __init__(
        self,
        poller: LinkPoller,
        links: LinkRounds,
        communicators: Communicators | None = None,
        report: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._poller = poller
        self._links = links
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
            inner = self._links.begin(spec.without_sums())
            return inner, OnDevices(spec, communicator, self._poller, self._stream_of(spec), self._rows)
        if devices <= {CPU}:
            inner = self._links.begin(spec)
            return inner, OverLinks(inner)
        if len(spec.members) == 1:
            return self._links.begin(spec.without_sums()), Alone(spec)
        staged = self._staging.stage(spec)
        inner = self._links.begin(staged)
        return inner, Staged(inner, spec, staged, self._stream_of(spec))

    def _stream_of(self, spec: RoundSpec) -> SideStream:
        if self._stream is None:
            self._stream = SideStream(spec.sums[0].device)
        return self._stream

    def status(self) -> DeviceStatus:
        """The status to report in the header of a round that has not failed."""
        communicator = self._communicator(self._key) if self._key else None
        if communicator is None or self._has_failed:
            return DeviceStatus.NOT_READY
        if communicator.condition is Condition.ENDED:
            self.report(communicator.reason)
        return DeviceStatus.READY if communicator.condition is Condition.READY else DeviceStatus.NOT_READY

    def on_statuses(self, statuses: Sequence[int], members: Workers, failure: str) -> None:
        """Process the statuses of a complete round. Raises Repeated if a member, maybe this one, has failed in it."""
        failed = [worker for worker, status in zip(members, statuses, strict=True) if status == DeviceStatus.FAILED]
        self._has_failed = self._has_failed or bool(failed)
        self._uses_devices = not self._has_failed and all(status == DeviceStatus.READY for status in statuses)
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

    def __init__(self, exchange: Exchange, inner: LinkRound, carrier: Carrier) -> None:
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
            status = DeviceStatus.FAILED if failure else self._exchange.status()
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
