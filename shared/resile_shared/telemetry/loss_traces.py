"""The trace of each host's loss, which whoever notices it later continues."""

from collections.abc import Iterable

from opentelemetry.context import Context, get_current

LOSS_DETECTIONS = 3
"""Detection times within which all have noticed the same loss."""


class LossTraces:
    """For each host that was lost in the last ``seconds``, the trace of the first decision about that."""

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._lost: dict[str, tuple[float, Context]] = {}

    def add(self, host: str, *, now: float) -> None:
        """The loss of ``host`` belongs to the current trace, unless it has one."""
        if self.of((host,), now=now) is None:
            self._lost[host] = now, get_current()

    def of(self, hosts: Iterable[str], *, now: float) -> Context | None:
        """Return the trace of the loss of one of ``hosts``."""
        self._lost = {host: lost for host, lost in self._lost.items() if now - lost[0] <= self._seconds}
        return next((self._lost[host][1] for host in hosts if host in self._lost), None)
