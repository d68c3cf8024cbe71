"""The stream on which an exchange runs beside the compute. A CPU has none: a call returns when all is done."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ExchangeStream:
    """A stream of its own on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event | None:
        """An event behind what the calling thread has queued on its current stream."""
        return torch.cuda.current_stream(self._device).record_event() if self._stream else None

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Run the body's operations on this stream, behind ``event``."""
        if self._stream is None or event is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            yield

    def wait(self) -> None:
        """Block the calling thread until all that was queued is done. Not for the main thread."""
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()
