"""How a member makes a call of its group: what it tells the others first, how long it may take, and how it fails."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import orjson

from resile_shared.errors import ResileError

_LINE = 160


class CallHeader(NamedTuple):
    """What a member calls, and what it knows."""

    generation: int
    """The newest generation that the member has formed."""
    call: str
    """The call as text, with the dtypes and shapes of what is reduced."""
    is_leaving: bool = False
    is_enrolled: bool = False
    """Whether the member has announced itself at a new rendezvous, after the loss of its own."""
    digest: str = ""
    """Digest of the state, where initial members compare it; empty elsewhere."""

    def encode(self) -> bytes:
        """Return the header as bytes."""
        return orjson.dumps(list(self))

    @staticmethod
    def decode(data: bytes) -> "CallHeader":
        """The inverse of ``encode``."""
        return CallHeader(*orjson.loads(data))


class Watchdog:
    """Calls ``on_timeout`` on a thread of its own, once a call lasts longer than ``seconds``."""

    def __init__(self, seconds: float, on_timeout: Callable[[], None]) -> None:
        self.seconds = seconds
        self._on_timeout = on_timeout
        self._deadline: float | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._run, name="resile-watchdog", daemon=True).start()

    def begin(self, deadline: float | None = None) -> None:
        """A call begins. It may last until ``deadline``, on the monotonic clock, if that is given."""
        self._deadline = time.monotonic() + self.seconds if deadline is None else deadline

    def end(self) -> None:
        """The call has ended."""
        self._deadline = None

    def close(self) -> None:
        """Stop watching."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(min(1.0, self.seconds / 10)):
            deadline = self._deadline
            if deadline is not None and time.monotonic() >= deadline:
                self._on_timeout()
                return


class MemberLost(ResileError):
    """Members were lost during an operation, which has no result; those that are left continue in this group.

    Call `Group.begin_iteration` and compute the iteration again: this member holds other shards now.
    """

    def __init__(self, member: int, reason: str) -> None:
        super().__init__(f"member {member} was lost during the operation: {reason}")
        self.member = member
        self.reason = reason


class Removed(ResileError):
    """The others continue without this member."""

    def __init__(self) -> None:
        super().__init__(
            "this member was removed from the group: the others could not reach it, or received nothing from it, for "
            "the rendezvous' detection_seconds. Call join() to become a member again"
        )


class RendezvousLost(ResileError):
    """The rendezvous no longer answers, and a change of the membership needs it."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the rendezvous at {address} is gone, and without it no member can join, leave or be removed: start it "
            "again, and let all members join again with their state"
        )


class CallsDiffer(ResileError):
    """Members called different operations, or the same with other shapes or dtypes. None was carried out."""

    def __init__(self, who: str, call: str, common: str) -> None:
        first = next((at for at, (one, other) in enumerate(zip(call, common, strict=False)) if one != other), 0)
        super().__init__(
            f"{who} called {_around(call, first)}, and the others {_around(common, first)}: all members make the same "
            "calls in the same order, with the same shapes and dtypes"
        )


class MemberTimeout(ResileError):
    """An operation did not end in time. This member can no longer use the group."""

    def __init__(self, seconds: float, call: str, missing: Sequence[int]) -> None:
        names = ", ".join(map(str, missing))
        awaited = f"member {names} has" if len(missing) == 1 else f"members {names} have"
        super().__init__(
            f"{call} has not ended after {seconds:g} seconds: "
            + (f"{awaited} not made the call" if missing else "no newer generation was agreed on")
            + ". Look at what it is doing (a stack dump), or join with a longer timeout"
        )
        self.missing = tuple(missing)


class Aborted(ResileError):
    """`Group.abort` was called on this member."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"this member left the group at once: {reason}")


def _around(call: str, first: int) -> str:
    """Return a call as text; if it is long, only the part around character ``first``, where it differs."""
    if len(call) <= _LINE:
        return call
    start = max(0, first - _LINE // 2)
    shown = call[start : start + _LINE]
    return ("..." if start else "") + shown + ("..." if start + _LINE < len(call) else "")
