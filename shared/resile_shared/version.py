"""The version of Resile that this process runs, and what is said to one that runs another.

All services and hosts of a pool run the version of its registry.
"""

from importlib.metadata import version

from .errors import ResileError

VERSION = version("resile")
"""Read once: a newer version may be installed while this process runs."""


class VersionMismatch(ResileError):
    """This process runs another version than its pool."""

    def __init__(self, *, pool: str) -> None:
        super().__init__(describe_mismatch("this machine", VERSION, pool=pool))
        self.pool = pool


def describe_mismatch(who: str, own: str, *, pool: str = VERSION) -> str:
    """Return one line that says which version ``who`` runs, which one its pool does, and what to do."""
    return f"{who} runs {_name(own)}, but its pool runs {_name(pool)}: install the pool's version and start again"


def _name(number: str) -> str:
    """Return the name of a version; versions that did not name themselves yet are empty."""
    return f"Resile {number}" if number else "an older version of Resile"
