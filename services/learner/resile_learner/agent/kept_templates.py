"""Which templates a host had, in a file of its agent's folder: the next incarnation prepares them before it joins."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pydantic

from resile_shared.bus.credentials import write_private
from resile_shared.errors import ResileError

from ..messages import Message
from .templates import KEEP

logger = logging.getLogger(__name__)


class KeptTemplate(Message):
    """What is needed to prepare a template again."""

    key: str
    code: str
    """Key of the package."""
    script: str
    """Path of the script relative to the package."""
    environment: str
    variables: dict[str, str]
    modules: tuple[str, ...]


class _Kept(Message):
    templates: tuple[KeptTemplate, ...] = ()


class KeptTemplates:
    """The templates in ``file``, in the order in which they became ready; at most one of each key."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> Sequence[KeptTemplate]:
        """Return the templates, the last one first; none if the file does not exist or cannot be used."""
        try:
            kept = _Kept.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, pydantic.ValidationError) as error:
            logger.warning("%s is not used: %s", self._file, " ".join(str(error).split()))
            return ()
        return kept.templates[::-1]

    def add(self, template: KeptTemplate) -> None:
        """Keep a template, in place of another one of its key, and of the oldest one if there are too many."""
        others = [other for other in self.read()[::-1] if other.key != template.key]
        self._write([*others, template][-KEEP:])

    def remove(self, template: KeptTemplate) -> None:
        """Remove a template, unless another one of its key has replaced it."""
        kept = self.read()[::-1]
        if template in kept:
            self._write([other for other in kept if other != template])

    def _write(self, templates: Sequence[KeptTemplate]) -> None:
        """Replace the file. Variables may be secret."""
        try:
            write_private(self._file, _Kept(templates=tuple(templates)).model_dump_json().encode())
        except ResileError as error:
            logger.warning("templates are not kept for the next start: %s", error)
