"""Watches allocations, each in a task of its own: a host gets those of the jobs that concern it, and no others."""

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from opentelemetry.context import Context

from resile_shared.bus.buckets import Bucket
from resile_shared.messages.allocations import Allocation
from resile_shared.telemetry.traces import context_of

from .events import AllocationGone, Event, UnwatchAllocation, WatchAllocation


class AllocationWatches:
    """Posts each allocation that is watched, with the trace in which it was written."""

    def __init__(self, bucket: Bucket[Allocation], post: Callable[[Event, Context], None]) -> None:
        self._bucket = bucket
        self._post = post
        self._group = asyncio.TaskGroup()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Run the watches that are begun from now on, until cancelled."""
        async with self._group:
            await asyncio.Event().wait()

    def change(self, command: WatchAllocation | UnwatchAllocation) -> None:
        """Begin or end a watch; after its end, nothing more of it is posted."""
        match command:
            case WatchAllocation(job):
                self._tasks[job] = self._group.create_task(self._watch(job))
            case UnwatchAllocation(job):
                self._tasks.pop(job).cancel()

    async def _watch(self, job: str) -> None:
        async with aclosing(self._bucket.watch(job)) as batches:
            async for changes in batches:
                for change in changes:
                    self._post(change.value or AllocationGone(change.key), context_of(change.headers))
