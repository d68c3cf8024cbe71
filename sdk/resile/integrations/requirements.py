"""Whether a library that an integration extends is installed, in a version whose inner workings it knows."""

import re
from importlib.metadata import PackageNotFoundError, version

from resile_shared.errors import UsageError

Release = tuple[int, ...]


def require(library: str, *, minimum: str, below: str) -> None:
    """Raises UsageError unless ``library`` is installed, from version ``minimum`` on and before ``below``."""
    wanted = f'pip install "{library}>={minimum},<{below}"'
    try:
        found = version(library)
    except PackageNotFoundError:
        raise UsageError(f"{library} is not installed, which resile.integrations.{library} extends: {wanted}") from None
    if not _release(minimum) <= _release(found) < _release(below):
        raise UsageError(
            f"{library} {found} is not supported by resile.integrations.{library}, which overrides parts of it that "
            f"other versions do not have: {wanted}"
        )


def _release(text: str) -> Release:
    """The numbers at the start of a version."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, found[0].split("."))) if found else ()
