"""Hints for errors that ordinary code raises in an elastic loop."""

import re
import traceback
from typing import Protocol

_USES_GRADIENTS = re.compile(r"\.grad\b|\bgrads\b|grad_norm|clip_grad")
_LACKS_VALUES = re.compile(r"None|empty|division by zero|out of range")
"""What errors say where a gradient is None, or where a list of those that are not None is empty."""


class GradientState(Protocol):
    """What a loop knows of the gradients of its model."""

    @property
    def missing_gradients(self) -> str:
        """Why parameters have no gradients in the current batch, and what to do; empty if they may have some."""


def hint_about_gradients(error: BaseException, loop: GradientState) -> str:
    """A remedy for ``error``, which ended a script that trains with ``loop``, or an empty string."""
    lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
    uses_gradients = any(map(_USES_GRADIENTS.search, lines)) and _LACKS_VALUES.search(str(error))
    return loop.missing_gradients if uses_gradients else ""


def hint_about_files(error: BaseException) -> str:
    """A remedy for ``error`` of one of several workers if all of them may write the same file, or an empty string."""
    is_of_file = isinstance(error, OSError) and error.filename is not None
    if not (is_of_file or isinstance(error, EOFError) or "PytorchStreamReader" in str(error)):
        return ""
    return (
        "all workers run this line, in the same folder: let only the worker with the lowest rank write files, and read "
        "what it has written, as in `if loader.is_lowest_rank:`"
    )
