"""The gradient exchange of one worker: rounds, one after the other, over its links."""

from .memory import Scratch
from .poller import LinkPoller
from .round import OpenRound
from .spec import RoundSpec


class GradientExchange:
    """Opens the rounds of ``worker``. For the main thread; others end a round by ``LinkPoller.abort_round``."""

    def __init__(self, poller: LinkPoller, worker: int) -> None:
        self._poller = poller
        self._worker = worker
        self._scratch = Scratch()

    def begin(self, spec: RoundSpec) -> OpenRound:
        """Open the next round. At most one is open at a time: one that was left unfinished is abandoned."""
        return OpenRound(self._poller, self._scratch, spec, self._worker)
