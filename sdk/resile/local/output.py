"""Which lines of the workers stand for all: those of the lowest rank, each once, also when that is another worker."""

from collections import deque

KEPT = 256
"""The number of lines of each worker that are remembered."""


class Output:
    """The lines that workers print to stdout.

    Workers print the same lines. One that is lost before it has printed a line that others have printed takes none
    along: they are shown once another worker is the lowest rank. And what that one still prints of the lines that were
    shown is not shown again.
    """

    def __init__(self) -> None:
        self._leader: int | None = None
        self._shown: deque[str] = deque(maxlen=KEPT)
        """The lines that were shown last."""
        self._others: dict[int, deque[str]] = {}
        """The newest lines of workers that are not the lowest rank."""
        self._repeated: deque[str] = deque()
        """What the lowest rank is going to print, and was shown already."""

    def follow(self, leader: int) -> list[str]:
        """From now on ``leader`` is the lowest rank; return what it has printed and was not shown."""
        if leader == self._leader:
            return []
        self._leader = leader
        own, shown = list(self._others.pop(leader, ())), list(self._shown)
        self._repeated = deque()
        if not own or not shown:
            return []
        if shown[-1] in own:
            missing = own[_last(own, shown[-1]) + 1 :]
            self._shown += missing
            return missing
        if own[-1] in shown:
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
        self._shown.append(line)
        return False


def _last(lines: list[str], line: str) -> int:
    return len(lines) - 1 - lines[::-1].index(line)
