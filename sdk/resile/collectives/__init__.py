"""The exchange of Resile alone: all-reduce among processes that come and go, without a pool, a bus or storage.

group.py       what a member does: iterations, all-reduce, recovery, leaving
calls.py       what a member tells the others of a call, how long it may take, and how it fails
contributions.py values of shards, folded in the tree while they come
member_state.py  the state that a joiner receives
rendezvous.py  the process that members find each other by; `python -m resile.collectives` serves one
enrollment.py  how a process becomes a worker of the rendezvous

Links, rounds, transfers of state and the membership of a worker are those of `resile_learner`; who goes on is decided
by the core of the scheduler: to it each member is a host of one slot. See docs/collectives.md.
"""

from resile_learner.collectives.tree import Interval
from resile_learner.session import StateLost
from resile_learner.state.facts import MembersDiffer

from .calls import Aborted, CallsDiffer, MemberLost, MemberTimeout, Removed, RendezvousLost
from .enrollment import JoinRefused, JoinTimeout
from .group import Group, join
from .rendezvous import Rendezvous, serve

__all__ = [
    "Aborted",
    "CallsDiffer",
    "Group",
    "Interval",
    "JoinRefused",
    "JoinTimeout",
    "MemberLost",
    "MemberTimeout",
    "MembersDiffer",
    "Removed",
    "Rendezvous",
    "RendezvousLost",
    "StateLost",
    "join",
    "serve",
]
