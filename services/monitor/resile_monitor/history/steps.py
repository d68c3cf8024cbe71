"""A number over time as steps, thinned to a bounded size: newer values are at a finer resolution.

Time is cut into intervals whose lengths are powers of two in milliseconds, longer for older values, and only the last
value of each interval is kept. Longer intervals consist of shorter ones, so it makes no difference to what is shown how
often steps are thinned, and series that are thinned at the same time have values at the same times: the jobs of a pool
never hold more slots together than the pool had.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from resile_shared.messages.slot_history import MAX_STEPS
from resile_shared.messages.slot_history import Steps as StoredSteps

FINEST_MS = 256
NUM_INTERVALS = 256
"""An interval is between a 256th and a 128th of its age."""


def interval_ms(age: int, *, finest: int = FINEST_MS) -> int:
    """Return the length of an interval of this age; ``finest`` is a power of two. All in milliseconds."""
    return max(finest, 1 << (max(0, age) // NUM_INTERVALS).bit_length())


def interval_of(time: int, newest: int, *, finest: int = FINEST_MS) -> tuple[int, int]:
    """Return the begin and the length of the interval that ``time`` is in, which depends on the age of its end."""
    length = interval_ms(newest - time, finest=finest)
    while True:
        begin = time // length * length
        if interval_ms(newest - (begin + length - 1), finest=finest) >= length:
            return begin, length
        length //= 2


@dataclass
class Steps:
    """A number that holds from each time to the next; 0 before the first."""

    times: list[int] = field(default_factory=list)
    """Milliseconds since the epoch, rising."""
    values: list[int] = field(default_factory=list)

    @property
    def last(self) -> int:
        """The newest value."""
        return self.values[-1] if self.values else 0

    @property
    def newest(self) -> int:
        """The newest time; 0 without one."""
        return self.times[-1] if self.times else 0

    def add(self, time: int, value: int) -> None:
        """Add a value from ``time`` on, or from the newest time on if that is later."""
        if value == self.last:
            return
        if self.times and time <= self.times[-1]:
            self.values[-1] = value
        else:
            self.times.append(time)
            self.values.append(value)
        if len(self.times) > MAX_STEPS:
            self.thin(self.times[-1])

    def thin(self, newest: int, *, finest: int = FINEST_MS) -> None:
        """Keep the last value of each interval, with ages relative to ``newest``, and at most `MAX_STEPS` values."""
        newest_of: dict[tuple[int, int], tuple[int, int]] = {}
        for time, value in zip(self.times, self.values, strict=True):
            newest_of[interval_of(time, newest, finest=finest)] = time, value
        befores = [0, *(value for _, value in newest_of.values())]
        kept = [step for before, step in zip(befores, newest_of.values(), strict=False) if step[1] != before]
        self.times = [time for time, _ in kept[-MAX_STEPS:]]
        self.values = [value for _, value in kept[-MAX_STEPS:]]

    def since(self, begin: int, newest: int, *, finest: int) -> "Steps":
        """Return the steps from ``begin`` on, each at the beginning of its interval, with ages up to ``newest``."""
        first = max(0, bisect_right(self.times, begin) - 1)
        shown = Steps(self.times[first:], self.values[first:])
        shown.thin(newest, finest=finest)
        found = Steps([begin], [0])
        for time, value in zip(shown.times, shown.values, strict=True):
            found.add(interval_of(time, newest, finest=finest)[0], value)
        return found

    def area(self, end: int) -> int:
        """Return the sum of value times milliseconds, up to ``end``."""
        ends = [*self.times[1:], max(end, self.newest)]
        return sum(value * (to - time) for time, value, to in zip(self.times, self.values, ends, strict=False))

    def message(self) -> StoredSteps:
        """Return what is stored of them."""
        return StoredSteps(times=tuple(self.times), values=tuple(self.values))

    @classmethod
    def of(cls, stored: StoredSteps) -> "Steps":
        """Return steps that go on from what is stored."""
        return cls(list(stored.times), list(stored.values))
