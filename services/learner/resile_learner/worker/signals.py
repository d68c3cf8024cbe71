"""SIGTERM, where it is sent to all processes of a machine: workers train on until their launcher ends them."""

import os
import signal
from types import FrameType

from torch.utils.data._utils import signal_handling


def leave_signals_to_launcher() -> None:
    """Let SIGTERM have no effect on this process and on the DataLoader workers of its script.

    Other processes that the script starts handle it as usual.
    """
    signal.signal(signal.SIGTERM, _do_nothing)
    os.register_at_fork(after_in_child=_handle_as_usual)
    set_handlers = signal_handling._set_worker_signal_handlers  # type: ignore[attr-defined]

    def set_handlers_and_block() -> None:
        set_handlers()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    signal_handling._set_worker_signal_handlers = set_handlers_and_block  # type: ignore[attr-defined]


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    pass


def _handle_as_usual() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
