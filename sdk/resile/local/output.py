"""Which lines of the workers stand for all: those of the lowest rank, each once, also when that is another worker."""

from collections import deque
from collections.abc import Sequence

KEPT = 256
"""The number of lines of each worker that are remembered."""


class LowestRankOutput:
    """The lines that workers print to stdout.

    Workers that train together print the same lines. One that is lost before it has printed a line that others have
    printed takes none along: they are shown once another worker is the lowest rank. And what that one still prints of
    the lines that were shown is not shown again.
    """

    def __init__(self) -> None:
        self._leader: int | None = None
        self._shown: deque[str] = deque(maxlen=KEPT)
        """The lines that were shown last."""
        self._num_shown = 0
        self._joined: dict[int, int] = {}
        """The number of lines that were shown before each member joined."""
        self._others: dict[int, deque[str]] = {}
        """The newest lines of workers that are not the lowest rank, of members those since they joined."""
        self._repeated: deque[str] = deque()
        """What the lowest rank is going to print, and was shown already."""

    def follow(self, members: Sequence[int]) -> list[str]:
        """From now on ``members`` train, the lowest rank first; return what that one has printed and was not shown."""
        before, self._joined = self._joined, {each: self._joined.get(each, self._num_shown) for each in members}
        for joiner in self._joined.keys() - before.keys():
            self._others.pop(joiner, None)
        leader = members[0]
        if leader == self._leader:
            return []
        self._leader = leader
        own = list(self._others.pop(leader, ()))
        self._repeated = deque()
        if leader not in before:  # all others were lost, and it starts over
            return []
        shown = list(self._shown)
        shown_since = shown[max(0, len(shown) - (self._num_shown - before[leader])) :]
        if own and (not shown_since or shown[-1] in own):
            missing = own[_last(own, shown[-1]) + 1 :] if shown_since else own
            self._show(missing)
            return missing
        if not own:
            self._repeated.extend(shown_since)
        elif own[-1] in shown:
            self._repeated.extend(shown[_last(shown, own[-1]) + 1 :])
        return []

    def printed(self, worker: int, line: str) -> bool:
        """Take a line that ``worker`` has printed; return whether it was shown already, as that of another worker."""
        if worker != self._leader:
            self._others.setdefault(worker, deque(maxlen=KEPT)).append(line)
            return False
        if self._repeated:
            if self._repeated.popleft() == line:
                return True
            self._repeated.clear()
        self._show([line])
        return False

    def _show(self, lines: Sequence[str]) -> None:
        self._shown += lines
        self._num_shown += len(lines)


def _last(lines: list[str], line: str) -> int:
    return len(lines) - 1 - lines[::-1].index(line)
