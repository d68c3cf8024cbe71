"""Separate threads for calls that may block for a long time.

The threads of asyncio's executor are few, and needed for the files of all jobs; and a process waits for them when it
exits.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call in a new thread; return the result. If its task is cancelled, the call goes on; no process waits for it."""
    return await asyncio.wrap_future(start_thread(call, *args, **kwargs))


def start_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """Call in a new thread, and return the future result, which cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call(*args, **kwargs)
        except BaseException as error:  # of any kind: it belongs to the caller that waits
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, daemon=True).start()
    return future
