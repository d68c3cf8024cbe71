"""The stream on which an exchange runs beside the compute. A CPU has none: a call returns when all is done."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


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
        """Run the body's operations on this stream, behind ``event`` if there is one."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if event is not None:
                self._stream.wait_event(event)
            yield

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Copy each source, as what the calling thread has queued leaves it, to its target in pinned memory.

        Returns at once; the targets must not be used until the event says that all copies are done.
        """
        with self.after(self.mark()):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return self._stream.record_event() if self._stream else None

    def wait(self) -> None:
        """Block the calling thread until all that was queued is done. Not for the main thread."""
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()

    def drain(self, seconds: float) -> bool:
        """Wait until all that was queued is done; return whether it is, ``seconds`` later at the latest."""
        if self._stream is None:
            return True
        done = self._stream.record_event()
        deadline = time.monotonic() + seconds
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True
