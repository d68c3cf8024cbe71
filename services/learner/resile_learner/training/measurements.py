"""How long iterations take, for the policy that decides about workers and batches. Pure: times are arguments.

The time of an iteration is that of the slowest worker (its data, its compute, its callback with the optimizer's step),
which is in the headers, and the rest: the exchange, as far as it did not overlap.
"""

import statistics
from collections import deque
from collections.abc import Sequence

from resile_shared.messages.reports import Measurement

from ..session import View
from .data.batches import Batch
from .stragglers import Pace

MAX_ITERATIONS = 256
"""One report sums up at most this many iterations, the newest."""


class Measurements:
    """The iterations since the last report, all of one generation and one batch."""

    def __init__(self) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=MAX_ITERATIONS)
        self._batch_size = 0
        self._is_first = True

    def restart(self) -> None:
        """A generation begins. Its first iteration does not count: it fills caches, and reads data anew."""
        self._times.clear()
        self._is_first = True

    def add(self, batch: Batch, paces: Sequence[Pace | None], *, seconds: float) -> None:
        """Take an iteration of ``seconds`` into account; ``paces`` are what its members measured."""
        is_first, self._is_first = self._is_first, False
        if batch.batch_size != self._batch_size:
            self._times.clear()
            self._batch_size = batch.batch_size
        if is_first or len(batch.indices) < batch.batch_size:
            return
        slowest = max((pace.data + pace.compute + pace.callback for pace in paces if pace), default=0.0)
        self._times.append((slowest, max(0.0, seconds - slowest)))

    def take(self, view: View) -> Measurement | None:
        """Return what was measured in the generation ``view`` since the last call; None: nothing."""
        if not self._times:
            return None
        compute, exchange = (statistics.median(times) for times in zip(*self._times, strict=True))
        measured = Measurement(
            workers=view.size,
            hosts=view.num_hosts,
            batch_size=self._batch_size,
            iterations=len(self._times),
            compute_seconds=compute,
            exchange_seconds=exchange,
        )
        self._times.clear()
        return measured
