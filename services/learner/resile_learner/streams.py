"""A device's stream for copies and exchanges, beside the compute. A CPU has none: calls return when all is done."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_WITHOUT_STREAMS = ("cpu", "mps")


def has_streams(device: torch.device) -> bool:
    """Whether ``device`` runs what is queued beside the calling thread, and host memory can be pinned for it.

    True for CUDA, and for other accelerators that have streams and events, such as PyTorch's simulated device.
    """
    return device.type not in _WITHOUT_STREAMS


class SideStream:
    """A separate stream on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if has_streams(device) else None

    def mark(self) -> torch.Event | None:
        """Record an event after what the calling thread has queued on its current stream."""
        return torch.accelerator.current_stream(self._device).record_event() if self._stream else None

    @contextmanager
    def after(self, event: torch.Event | None) -> Iterator[None]:
        """Run the body's operations on this stream, after ``event`` if there is one."""
        if self._stream is None:
            yield
            return
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            if event is not None:
                self._stream.wait_event(event)
            yield
        finally:
            torch.accelerator.set_stream(before)

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate host memory for `copy`, pinned so that the device can read and write it directly."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> torch.Event | None:
        """Copy each source to its target, after what the calling thread has queued. One of the two is in pinned memory.

        Returns at once; the targets must not be used, and the sources must not be changed, until the event says that
        all copies are done.
        """
        with self.after(self.mark()):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=self._stream is not None)
            return self._stream.record_event() if self._stream else None

    def wait(self) -> None:
        """Block the calling thread until all that was queued is done. Not for the main thread."""
        if self._stream is not None:
            done = torch.Event(self._device, blocking=True)
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
