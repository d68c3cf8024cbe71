"""A stream for output that accompanies the work: its faults lose text, and never stop the work."""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)
"""Errors after which a later write may succeed; a reader or a terminal that is gone does not come back."""


class LenientStream(io.TextIOBase, TextIO):
    """Writes to another stream, and never raises: what cannot be written is lost.

    After an error that lasts, the other stream is connected to the null device.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """Write to ``stream``, which is None if the process was started without it."""
        self._stream = io.StringIO() if stream is None else stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the other stream."""
        return self._stream.encoding or "utf-8"

    def fileno(self) -> int:
        """Return the descriptor of the other stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the other stream is a terminal."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """Write ``text``, with escapes for the characters that the stream cannot encode."""
        encodable = text.encode(self.encoding, errors="backslashreplace").decode(self.encoding)
        with self._dropping_what_fails():
            self._stream.write(encodable)
        return len(text)

    def flush(self) -> None:
        """Flush the other stream."""
        with self._dropping_what_fails():
            self._stream.flush()

    @contextmanager
    def _dropping_what_fails(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            descriptor = self._stream.fileno()
            before, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            self._stream.flush()  # what stays in the buffer fails again when the process ends
            if error.errno in _MAY_PASS:
                os.dup2(before, descriptor)
            os.close(before)
            os.close(nowhere)
