"""What a job waits for after failures: hosts that it avoids, and the next start, longer each time; and larger sizes.

Nothing of this is stored: a new scheduler tries again at once, which costs one start.
"""

BACKOFF_SECONDS = 5.0
MAX_BACKOFF_SECONDS = 300.0
GROWTH_SECONDS = 300.0
"""How long a job stays below a size that did not work."""
RESTART_SECONDS = 1.0
"""The first pause before another start; each further start that makes no progress doubles it."""
MAX_DOUBLINGS = 10
"""The most doublings of a pause: more make no difference, and after some days would overflow a float."""


class HostBackoff:
    """The hosts that one job avoids."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._times: dict[str, int] = {}

    def add(self, host: str, *, now: float) -> None:
        """Avoid ``host``, twice as long as the last time."""
        times = self._times[host] = self._times.get(host, 0) + 1
        self._until[host] = now + _doubled(BACKOFF_SECONDS, times - 1)

    def forget(self, host: str) -> None:
        """Use ``host`` again, as if no worker had failed there."""
        self._until.pop(host, None)
        self._times.pop(host, None)

    @property
    def is_active(self) -> bool:
        """Whether there may be hosts that it avoids."""
        return bool(self._until)

    def avoided(self, *, now: float) -> frozenset[str]:
        """Return the hosts that must not get workers now."""
        return frozenset(host for host, until in self._until.items() if until > now)

    def expire(self, *, now: float) -> list[str]:
        """Return the hosts whose backoff is over, each once."""
        expired = [host for host, until in self._until.items() if until <= now]
        for host in expired:
            del self._until[host]
        return expired


class StartBackoff:
    """When one job may start again. The first start after one that made progress need not wait."""

    def __init__(self) -> None:
        self._num_fruitless = 0
        self._begun = float("inf")
        self._until = float("-inf")

    def begin(self, iteration: int) -> None:
        """Record that the job trains from ``iteration`` on."""
        self._begun = iteration

    def end(self, iteration: int, *, now: float) -> None:
        """Record that the job has no workers any more, after it reached ``iteration``."""
        self._num_fruitless = 0 if iteration > self._begun else self._num_fruitless + 1
        self._begun = float("inf")
        if self._num_fruitless > 1:
            self._until = now + _doubled(RESTART_SECONDS, self._num_fruitless - 2)

    def forget(self) -> None:
        """Start at once, as if no start had been fruitless."""
        self._num_fruitless, self._until = 0, float("-inf")

    @property
    def is_active(self) -> bool:
        """Whether there may be a start that has to wait."""
        return self._until > float("-inf")

    def is_waiting(self, *, now: float) -> bool:
        """Whether the job must not start yet."""
        return now < self._until

    def expire(self, *, now: float) -> bool:
        """Return whether the pause is over; True only once."""
        is_over = float("-inf") < self._until <= now
        if is_over:
            self._until = float("-inf")
        return is_over


class GrowthLimit:
    """How many workers one job can have, by what one of them has refused."""

    def __init__(self) -> None:
        self.most: int | None = None
        """None: nothing was refused."""
        self._until = float("-inf")

    def set(self, most: int, *, now: float) -> None:
        """Have no more than ``most`` workers for a while."""
        self.most = most if self.most is None else min(self.most, most)
        self._until = now + GROWTH_SECONDS

    def expire(self, *, now: float) -> bool:
        """Return whether larger sizes may be tried again; True only once."""
        is_over = self.most is not None and self._until <= now
        if is_over:
            self.most = None
        return is_over


def _doubled(seconds: float, times: int) -> float:
    return min(seconds * 2.0 ** min(times, MAX_DOUBLINGS), MAX_BACKOFF_SECONDS)
