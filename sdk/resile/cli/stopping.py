"""The end of commands that run until a signal: the first one drains, a second one ends at once."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

ONE_SIGNAL_SECONDS = 0.3  # some senders tell the process and its group: that is one signal, not two


class Supervising(Protocol):
    """What starts and keeps processes."""

    def pids(self) -> set[int]:
        """Return the ids of its processes."""

    async def kill(self) -> None:
        """End at once what is left."""


async def until_stopped(
    supervisor: Supervising, work: Coroutine[Any, Any, None], *, tell: Callable[[str], None], last_word: str
) -> int:
    """Do ``work`` until a signal cancels it; return the exit status of the command."""
    from ..pool.strays import end_strays

    loop = asyncio.get_running_loop()
    strays = asyncio.ensure_future(end_strays(supervisor.pids))
    task = asyncio.ensure_future(work)
    signals: list[tuple[signal.Signals, float]] = []

    def stop(number: signal.Signals) -> None:
        if signals and loop.time() - signals[0][1] < ONE_SIGNAL_SECONDS:
            return
        signals.append((number, loop.time()))
        tell("draining; once more ends it at once" if len(signals) == 1 else "ending at once")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
            loop.add_signal_handler(number, stop, number)
    try:
        await asyncio.wait({task})
    finally:
        strays.cancel()
        await supervisor.kill()
    if not task.cancelled():
        task.result()
    if len(signals) > 1:
        return 128 + signals[-1][0]
    tell(last_word)
    return 0
