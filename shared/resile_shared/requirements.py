"""What a job needs beyond the pool's own packages: requirements, written as for pip (PEP 508)."""

import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from .errors import UsageError

MAX_REQUIREMENTS = 500
MAX_REQUIREMENT = 1000
"""The maximum number of characters of one requirement."""
POOL_PACKAGES = ("resile", "torch")
"""Packages that are always the pool's, whatever a job requires: its bits depend on them."""


def parse_requirement(text: str) -> str:
    """Return a requirement in one spelling. Raises ValueError, with what is wrong and what to do."""
    text = text.strip()
    if text.startswith("-"):
        raise ValueError(
            f"{text!r} is an option of pip: name packages only; the index is that of the host's pip configuration"
        )
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        problem = str(error).splitlines()[0]
        raise ValueError(f"{text!r} is not a requirement ({problem}): write it as in 'einops>=0.8'") from None
    if requirement.url and requirement.url.startswith("file:"):
        raise ValueError(f"{text!r} names a file, and hosts do not have it: name a package of an index")
    requirement.name = canonicalize_name(requirement.name)
    return str(requirement)


def parse_requirements(texts: Iterable[str]) -> tuple[str, ...]:
    """Return requirements in one spelling and order, each once. Raises ValueError."""
    return tuple(sorted({parse_requirement(text) for text in texts}))


def read_requirements(file: Path) -> tuple[str, ...]:
    """Read the requirements of a requirements.txt, or the dependencies of a pyproject.toml. Raises UsageError."""
    try:
        text = file.read_text(encoding="utf-8")
        lines = _project_dependencies(text) if file.suffix == ".toml" else _lines(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--requirements: {file} cannot be read: {error}") from error
    found = []
    for place, line in lines:
        try:
            found.append(parse_requirement(line))
        except ValueError as error:
            raise UsageError(f"--requirements: {file}, {place}: {error}") from error
    return tuple(sorted(set(found)))


def _lines(text: str) -> list[tuple[str, str]]:
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    return [(f"line {number}", line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]


def _project_dependencies(text: str) -> list[tuple[str, str]]:
    dependencies = tomllib.loads(text).get("project", {}).get("dependencies", [])
    return [(f"dependency {number}", str(line)) for number, line in enumerate(dependencies, 1)]
