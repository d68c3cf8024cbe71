"""Code that all forked processes share: from the fork to the worker's entry function, and their end."""

import contextlib
import io
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from ..messages import WorkerConfig
from .fork_protocol import FORK_DESCRIPTORS

Entry = Callable[[WorkerConfig, socket.socket], int]


def reset_signals() -> None:
    """Handle signals as a worker does: Ctrl-C in a terminal is for the launcher alone."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def open_outputs() -> None:
    """Open new text streams on descriptors 1 and 2."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(descriptor, "w", closefd=False)
        text = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)


def adopt(descriptors: Sequence[int]) -> tuple[WorkerConfig, socket.socket]:
    """Make the descriptors of a fork request this process's own; return the arguments of the entry function."""
    ends = dict(zip(FORK_DESCRIPTORS, descriptors, strict=True))
    os.dup2(ends["stdout"], 1)
    os.dup2(ends["stderr"], 2)
    os.close(ends["stdout"])
    os.close(ends["stderr"])
    for name in ("agent", "config"):
        os.set_inheritable(ends[name], False)
    with open(ends["config"], "rb", closefd=False) as file:  # stays open: `protocol.process_name`
        config = WorkerConfig.model_validate_json(file.read())
    os.environ.update(config.env)
    os.chdir(config.directory)
    return config, socket.socket(fileno=ends["agent"])


def exit_with(main: Callable[[], int]) -> NoReturn:
    """End this process according to what ``main`` returns or raises."""
    status = 1
    try:
        status = main()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status & 0xFF)


def end_library_threads() -> None:
    """Fork once: OpenBLAS starts threads when numpy is imported, ends them before a fork, restarts them on demand.

    Raises RuntimeError if a thread stays: a fork copies only the thread that calls it.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    tasks = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len(tasks) > 1 or threading.active_count() > 1:
        threads = ", ".join(thread.name for thread in threading.enumerate())
        raise RuntimeError(f"an import left {len(tasks)} threads running ({threads}), so no fork is safe")
