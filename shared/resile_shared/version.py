"""The version of Resile that this process runs, and the errors for those that run another.

All services and hosts of a pool run the version of its registry.
"""

from importlib.metadata import PackageNotFoundError, version

from .errors import ResileError

VERSION = version("resile")
"""The version of this process. It is read once: a newer one may be installed while the process runs."""


class VersionMismatch(ResileError):
    """This process runs another version than its pool."""

    def __init__(self, *, pool: str) -> None:
        super().__init__(describe_mismatch("this machine", VERSION, pool=pool))
        self.pool = pool


class OtherVersionInstalled(ResileError):
    """What this process would start is of another version than this process."""

    def __init__(self, installed: str) -> None:
        super().__init__(
            f"{installed or 'no version'} of Resile is installed now, but {VERSION} runs: install {VERSION} again, or "
            "stop what runs and start it again"
        )


def check_installed() -> None:
    """Raise OtherVersionInstalled if Resile was upgraded while this process runs: new processes would not fit it."""
    try:
        installed = version("resile")
    except PackageNotFoundError:  # in the middle of an upgrade
        installed = ""
    if installed != VERSION:
        raise OtherVersionInstalled(installed)


def describe_mismatch(who: str, own: str, *, pool: str = VERSION) -> str:
    """Return one line that says which version ``who`` runs, which one its pool does, and what to do."""
    return f"{who} runs {_name(own)}, but its pool runs {_name(pool)}: install the pool's version and start again"


def _name(number: str) -> str:
    """Return the name of a version; versions that did not name themselves yet are empty."""
    return f"Resile {number}" if number else "an older version of Resile"
