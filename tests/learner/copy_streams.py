"""Streams that stand for a device whose tensors are in memory of the host: they copy as early or as late as allowed."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class FakeStream:
    """Copies in order: each when it is started, or, if ``late``, when somebody waits for it or for a newer one."""

    def __init__(self, *, late: bool) -> None:
        self.buffers: list[Tensor] = []
        self.num_started = 0
        self.num_done = 0
        self._late = late
        self._waiting: deque[tuple[Sequence[Tensor], Sequence[Tensor]]] = deque()

    def allocate(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.full((num_bytes,), 0xEE, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> "FakeCopy":
        self._waiting.append((list(targets), list(sources)))
        self.num_started += 1
        if not self._late:
            self.finish(self.num_started)
        return FakeCopy(self, self.num_started)

    def finish(self, number: int) -> None:
        while self.num_done < number:
            for target, source in zip(*self._waiting.popleft(), strict=True):
                target.copy_(source)
            self.num_done += 1


class FakeCopy:
    def __init__(self, stream: FakeStream, number: int) -> None:
        self._stream = stream
        self._number = number

    def synchronize(self) -> None:
        self._stream.finish(self._number)


def staged_by(stream: FakeStream) -> Callable[[torch.device], FakeStream]:
    return lambda device: stream
