"""The control thread of a worker: it runs `WorkerControl` on an event loop of its own."""

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from ..collectives.poller import LinkPoller
from ..messages import WorkerConfig
from . import links
from .control import WorkerControl
from .failure import stalled
from .peers import MAX_LINE_BYTES

JOIN_SECONDS = 5


class ControlThread:
    """For the main thread alone, except for ``control``. ``agent`` is the connection to the agent.

    ``exit_process`` is called with 0 when the agent stops this worker, and with 1 when the agent is gone.
    """

    def __init__(
        self,
        config: WorkerConfig,
        agent: socket.socket,
        poller: LinkPoller,
        *,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._host = config.host
        self._agent = agent
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="resile-control", daemon=True)
        self.control = WorkerControl(
            config, poller, self._loop, exit_process=exit_process, describe_stall=partial(stalled, config)
        )

    def start(self) -> None:
        """Start the thread; return when peers can connect to this worker."""
        self._thread.start()
        self.control.wait_until_listening()

    def stop(self) -> None:
        """Send what is still unsent to the agent, and end the thread."""
        self.control.end()
        self._thread.join(timeout=JOIN_SECONDS)

    def leave_process(self, *, status: int) -> NoReturn:
        """Stop, and end the process without returning to the user's script, whatever it would catch.

        What was printed is not lost.
        """
        self.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
        except Exception as error:
            self.control.fail(error)
        finally:
            self._loop.close()
        if self.control.is_stalled:
            os._exit(1)

    async def _main(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._agent, limit=MAX_LINE_BYTES)
        await self.control.run(reader, writer, links.listen(self._host))
