"""What a process uses: `join` a group, and take part in its iterations."""

from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import Any, Literal

from resile_learner.collectives.spec import Abandoned
from resile_learner.collectives.tree import pieces, ranges
from resile_learner.state.run import RunState
from resile_shared.errors import UsageError

from .calls import MemberLost, Removed, RendezvousLost
from .contributions import Contributions, Value
from .enrollment import Enrolled, Enrollment
from .member import FoundAgain, Member
from .member_state import run_state, state_digest
from .messages import MAX_MEMBERS, Hello

BOUNDARY = "begin_iteration() or leave()"
Operation = Literal["mean", "sum"]


def join(
    address: str,
    state: MutableMapping[str, Any] | None = None,
    *,
    size: int = 1,
    num_shards: int | None = None,
    token: str = "",
    timeout: float = 300.0,
) -> "Group":
    """Become a member of the group whose rendezvous is at ``address`` ("host:port"); blocks until it is one.

    The group starts with ``size`` members or more, which bring equal ``state``; a member that comes later receives it.
    Values of ``state`` are tensors, objects with ``state_dict`` and ``load_state_dict``, and plain values; tensors and
    objects are loaded in place. ``num_shards`` is the number of values that an all-reduce adds up, whatever the number
    of members, and the maximum number of members; None: one value for each member. ``timeout``, in seconds, limits this
    call and each later one.

    The group belongs to the thread that joined. Raises JoinRefused, JoinTimeout, MembersDiffer when initial members
    have different states, and UsageError.
    """
    most = MAX_MEMBERS if num_shards is None else num_shards
    if not 1 <= size <= most <= MAX_MEMBERS:
        raise UsageError(f"size={size}, num_shards={num_shards}: pass 1 <= size <= num_shards <= {MAX_MEMBERS}")
    if not timeout > 0:
        raise UsageError(f"timeout is {timeout:g}: it must be above 0 seconds")
    state = {} if state is None else state
    return Group(Entrance(address, state, num_shards=num_shards, token=token, timeout=timeout), size)


class Entrance:
    """How a process becomes a member: of the group that it joins, and again after the loss of its rendezvous."""

    def __init__(
        self, address: str, state: MutableMapping[str, Any], *, num_shards: int | None, token: str, timeout: float
    ) -> None:
        self.num_shards = num_shards
        self._address = address
        self._state = state
        self._token = token
        self._timeout = timeout

    def join(self, size: int) -> Member:
        """Become a member of a group that starts with ``size`` members."""
        hello = Hello(size=size, num_shards=self.num_shards, token=self._token)
        enrollment = Enrollment(self._address, hello, timeout=self._timeout)
        while True:
            try:
                whole = run_state(self._state, {"num_shards": str(self.num_shards)})
                return self._member(enrollment.enroll(), whole, enrollment)
            except (Removed, RendezvousLost):  # the start was cancelled, since another was lost before it was complete
                continue

    def join_again(self, enrolled: Enrolled, whole: RunState, size: int) -> Member:
        """Continue with the same members and state at another rendezvous."""
        return self._member(enrolled, whole, self._reenroll(size, self._timeout))

    def _member(self, enrolled: Enrolled, whole: RunState, enrollment: Enrollment) -> Member:
        member = Member(enrolled, whole, address=self._address, timeout=self._timeout, enrollment=self._reenroll)
        try:
            most = MAX_MEMBERS if self.num_shards is None else self.num_shards
            member.join(state_digest(self._state), num_shards=most, enrollment=enrollment)
        except BaseException:
            member.close()
            raise
        return member

    def _reenroll(self, size: int, seconds: float) -> Enrollment:
        hello = Hello(size=size, num_shards=self.num_shards, token=self._token, is_member=True)
        return Enrollment(self._address, hello, timeout=seconds)


class Group:
    """A group as one of its members sees it. ``with`` leaves at the end of the block, or at once if it raises."""

    def __init__(self, entrance: Entrance, size: int) -> None:
        self._entrance = entrance
        self._member = entrance.join(size)
        self._num_shards = entrance.num_shards
        self._is_open = False
        """Whether an iteration is in progress."""

    @property
    def member(self) -> int:
        """The id of this member, unique as long as the rendezvous lives. A new rendezvous assigns new ids."""
        return self._member.number

    @property
    def members(self) -> tuple[int, ...]:
        """The ids of all members, in rank order."""
        return self._member.view.workers

    @property
    def rank(self) -> int:
        """This member's place among the members."""
        return self._member.view.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._member.view.size

    @property
    def iteration(self) -> int:
        """How many iterations are complete."""
        return self._member.state.progress.iteration

    @property
    def num_shards(self) -> int:
        """How many values an all-reduce adds up."""
        return self._num_shards or self.size

    @property
    def shards(self) -> range:
        """The shards of this member. They change with the membership, so read them in each iteration."""
        return range(*ranges(self.num_shards, self.size)[self.rank])

    def begin_iteration(self) -> None:
        """Begin the next iteration: members join and leave here, and nowhere else.

        The state is that after all iterations so far, and the same on all members: change it after the last operation
        of an iteration. Members that were lost meanwhile are dropped without an error. Raises CallsDiffer,
        MemberTimeout, Removed, RendezvousLost, StateLost if no member with the complete state is left, and JoinTimeout
        if the members do not find each other again at a restarted rendezvous.
        """
        self._at_boundary(partial(Member.pass_boundary, call=BOUNDARY, is_leaving=False))
        self._is_open = True

    def all_reduce(self, values: Iterable[Value], op: Operation = "mean") -> Any:
        """Return the mean or sum over the values of all shards, with the same bits on any number of members.

        ``values`` has one for each of `shards`, in order: a tensor, or a list of tensors, alike for all shards, of any
        shapes and of dtypes that can be added. Values are added up as they come, so that an iterator that computes them
        needs memory for a few only. The result has the form of one value, in new memory on the devices of the values.

        Raises MemberLost, without a result: call `begin_iteration`, and compute the iteration again. Raises UsageError,
        CallsDiffer on all members, MemberTimeout, Removed, RendezvousLost.
        """
        if op not in ("mean", "sum"):
            raise UsageError(f'op is {op!r}: pass "mean" or "sum"')
        if not self._is_open:
            raise UsageError("all_reduce was called outside of an iteration: call begin_iteration() first")
        num_shards = self.num_shards
        held = tuple(pieces(num_shards, part) for part in ranges(num_shards, self.size))
        given = Contributions(values, held[self.rank], num_shards)
        if op == "mean":
            given.check_mean()
        call = f'all_reduce({given.signature}, op="{op}")'
        with self._member.call(call):
            try:
                self._member.agree(call)
                self._member.reduce(given, held, num_shards)
            except Abandoned as lost:
                self._is_open = False
                self._member.recover(lost)
                raise MemberLost(lost.suspect, lost.reason) from lost
        return given.result(num_shards if op == "mean" else None)

    def leave(self) -> None:
        """Complete the iteration and leave; the others continue, unless all leave here.

        Once this member has left, it has no effect. Raises what `begin_iteration` does.
        """
        if self._member.is_closed:
            return
        try:
            self._at_boundary(partial(Member.leave, call=BOUNDARY))
        finally:
            self._member.close()

    def abort(self, reason: str = "abort() was called") -> None:
        """Leave at once, from any thread: the call in progress raises Aborted, and the others lose this member."""
        self._member.abort(reason)

    def _at_boundary(self, action: Callable[[Member], object]) -> None:
        """Complete the iteration, and have the member run ``action``, also if it has to move to a new rendezvous."""
        while True:
            try:
                with self._member.call(BOUNDARY):
                    self._complete_iteration()
                    action(self._member)
                    return
            except FoundAgain as found:
                self._member = self._entrance.join_again(found.enrolled, self._member.state, self.size)

    def _complete_iteration(self) -> None:
        self._member.state.progress.iteration += self._is_open
        self._is_open = False

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.leave()
        else:
            self._member.close()
