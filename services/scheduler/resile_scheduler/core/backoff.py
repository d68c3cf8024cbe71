"""Hosts on which workers of a job failed: the job avoids them for a while, longer each time."""

BACKOFF_SECONDS = 5.0
MAX_BACKOFF_SECONDS = 300.0


class HostBackoff:
    """The hosts that one job avoids. A new scheduler tries them again at once, which costs one start."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._times: dict[str, int] = {}

    def add(self, host: str, *, now: float) -> None:
        """Avoid ``host``, twice as long as the last time."""
        times = self._times[host] = self._times.get(host, 0) + 1
        self._until[host] = now + min(BACKOFF_SECONDS * 2 ** (times - 1), MAX_BACKOFF_SECONDS)

    def forget(self, host: str) -> None:
        """Use ``host`` again, as if no worker had failed there."""
        self._until.pop(host, None)
        self._times.pop(host, None)

    def avoided(self, *, now: float) -> frozenset[str]:
        """Return the hosts that must not get workers now."""
        return frozenset(host for host, until in self._until.items() if until > now)

    def expire(self, *, now: float) -> list[str]:
        """Return, once, the hosts whose time is over."""
        expired = [host for host, until in self._until.items() if until <= now]
        for host in expired:
            del self._until[host]
        return expired
