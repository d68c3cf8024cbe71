"""How a call of a group fails."""

from collections.abc import Sequence

from resile_shared.errors import ResileError

_LINE = 160


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
