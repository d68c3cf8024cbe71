"""The roles of a worker in its job, and the transitions between them.

A worker is NEW until it has seen an order that names it, then JOINING: it waits until it is linked to all members and
its script is at the training call. It becomes a MEMBER of the initial generation together with the others, of a later
one with the state that a member hands over, or by a recovery. A switch to a generation without it makes it LEAVING:
it stays until the others have what it has, and a recovery order may call it back. It is RELEASED when a newer
generation is active without it; only a state sync that it had already begun can still make it a member. A joiner that
no generation needs any more, and a member that a recovery order drops, is WITHDRAWN: its process exits.
"""

from enum import Enum


class Role(Enum):
    """What a worker is to its job."""

    NEW = "new"
    JOINING = "joining"
    MEMBER = "member"
    LEAVING = "leaving"
    RELEASED = "released"
    WITHDRAWN = "withdrawn"


TRANSITIONS: dict[Role, frozenset[Role]] = {
    Role.NEW: frozenset({Role.JOINING}),
    Role.JOINING: frozenset({Role.MEMBER, Role.WITHDRAWN}),
    Role.MEMBER: frozenset({Role.MEMBER, Role.LEAVING, Role.WITHDRAWN}),
    Role.LEAVING: frozenset({Role.MEMBER, Role.RELEASED}),
    Role.RELEASED: frozenset({Role.MEMBER, Role.RELEASED}),
    Role.WITHDRAWN: frozenset(),
}


class IllegalTransition(Exception):
    """A worker was about to change into a role that does not follow its present one: an error in this program."""

    def __init__(self, worker: int, old: Role, new: Role) -> None:
        super().__init__(f"worker {worker} cannot change from {old.value} to {new.value}")
