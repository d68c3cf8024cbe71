"""Signals of commands that run until stopped: the first one lets jobs leave, a second one stops at once."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

ONE_SIGNAL_SECONDS = 0.3  # some senders signal both the process and its group: that counts once


@dataclass(frozen=True)
class StopMessages:
    """What is printed at the first signal, at the second one, and at the end."""

    first: str
    second: str
    final: str


class Supervising(Protocol):
    """A supervisor of processes."""

    def pids(self) -> set[int]:
        """Return the ids of the supervised processes."""

    async def kill(self) -> None:
        """Kill all remaining processes."""


async def until_stopped(
    supervisor: Supervising, work: Coroutine[Any, Any, None], *, log: Callable[[str], None], messages: StopMessages
) -> int:
    """Do ``work`` until a signal cancels it; return the exit status of the command.

    Nothing is started if a signal came so early that asyncio has cancelled this task instead.
    """
    from resile_learner.processes.descendants import OwnProcesses

    from ..pool.worker_processes import kill_orphans

    loop = asyncio.get_running_loop()
    signals: list[tuple[signal.Signals, float]] = []

    def stop(number: signal.Signals) -> None:
        if signals and loop.time() - signals[0][1] < ONE_SIGNAL_SECONDS:
            return
        signals.append((number, loop.time()))
        task.cancel()
        log(messages.first if len(signals) == 1 else messages.second)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # set by nohup
            loop.add_signal_handler(number, stop, number)
    if _is_cancelled():
        work.close()
        await supervisor.kill()
        raise asyncio.CancelledError
    orphans = asyncio.ensure_future(kill_orphans(supervisor.pids, OwnProcesses()))
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    finally:
        orphans.cancel()
        await supervisor.kill()
    if not task.cancelled():
        task.result()
    if len(signals) > 1:
        return 128 + signals[-1][0]
    log(messages.final)
    return 0


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
