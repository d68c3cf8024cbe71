"""One worker process: the messages it sends, the lines it prints, and how it ended."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import pydantic

from resile_shared.errors import ResileError
from resile_shared.messages.hosts import WorkerExit
from resile_shared.validation import phrase

from ..messages import Failed, Finished, FromWorker, Left, Order, Pause, Stop, Trained, encode, from_worker
from .exits import LastMessage, OutOfMemoryKills, classify
from .worker_log import Lines

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, str], None]
Pipe = tuple[asyncio.ReadTransport, Lines]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DRAIN_SECONDS = 2.0


class MalformedMessageError(ResileError):
    """A worker wrote something to its socket that is not a message."""

    def __init__(self, worker: int, problem: str) -> None:
        self.worker = worker
        super().__init__(f"worker {worker} sent a malformed message: {problem}")


class _ReadToItsEnd(asyncio.StreamReaderProtocol):
    """What arrived at a socket is read, however its connection ended.

    A process that ends before it has read all that was sent to it resets its connection, and asyncio gives up what it
    has not read by then. Another descriptor of the socket still has it.
    """

    def __init__(self, reader: asyncio.StreamReader, ours: socket.socket) -> None:
        super().__init__(reader)
        self._reader = reader
        self._ours = ours.dup()
        self._ours.setblocking(False)

    def connection_lost(self, exc: Exception | None) -> None:
        with self._ours, contextlib.suppress(OSError):
            while data := self._ours.recv(2**16):
                self._reader.feed_data(data)
        super().connection_lost(None)


async def open_connection(ours: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open our end of a worker's socket. Its reader returns all that the worker wrote, and then the end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_MESSAGE_BYTES)
    transport, protocol = await loop.create_connection(lambda: _ReadToItsEnd(reader, ours), sock=ours)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class WorkerProcess:
    """One worker. Read `messages` to their end, then `wait`. `ForkServerClient.fork` makes it."""

    def __init__(
        self,
        worker: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outputs: Sequence[Pipe],
        kill: Callable[[], None],
    ) -> None:
        self.worker = worker
        self.pid: int | None = None
        self.kill = kill
        """Kills the process with all it has started."""
        self._reader = reader
        self._writer = writer
        self._outputs = outputs
        self._last_message: LastMessage = None
        self._status: tuple[int, bool] | None = None
        self._exit: asyncio.Future[WorkerExit | None] = asyncio.get_running_loop().create_future()
        self._is_known = asyncio.Event()
        """Set once ``pid`` is known, or never will be."""

    @classmethod
    async def connect(
        cls, worker: int, on_output: OnOutput, kill: Callable[[], None]
    ) -> "tuple[list[int], WorkerProcess]":
        """Open a worker's socket and pipes; return its ends (socket, stdout, stderr), and ours as a WorkerProcess."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        reader, writer = await open_connection(ours)
        descriptors = [theirs.detach()]
        outputs: list[Pipe] = []
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for stream in streams:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            lines = Lines(lambda line, stream=stream: on_output(stream, line))  # type: ignore[misc]
            transport, _ = await loop.connect_read_pipe(lambda lines=lines: lines, os.fdopen(read_end, "rb", 0))  # type: ignore[misc]
            descriptors.append(write_end)
            outputs.append((transport, lines))
        return descriptors, cls(worker, reader, writer, outputs, kill)

    async def messages(self) -> AsyncIterator[FromWorker]:
        """Iterate over the worker's messages until its process has ended. Raises MalformedMessageError.

        From the first message on ``pid`` is known, unless the fork server ended before it sent that.
        """
        await self._is_known.wait()
        while line := await self._read_line():
            try:
                message = from_worker.validate_json(line)
            except pydantic.ValidationError as error:
                fault = error.errors()[0]
                raise MalformedMessageError(self.worker, f"{phrase(fault['msg'])}, in {line[:200]!r}") from error
            if message.worker != self.worker:
                raise MalformedMessageError(self.worker, f"it signed as worker {message.worker}")
            if isinstance(message, Trained | Finished | Left | Failed):
                self._last_message = message
            yield message
        self._writer.close()  # the worker waits for it

    async def _read_line(self) -> bytes:
        try:
            return await self._reader.readline()
        except ValueError as error:
            raise MalformedMessageError(self.worker, f"a line longer than {MAX_MESSAGE_BYTES} bytes") from error

    def send(self, message: Order | Stop | Pause) -> None:
        """Send a message; it is dropped if the process has ended."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def wait(self) -> WorkerExit:
        """Wait for the end of the process, and return how it ended; all its output is delivered by then."""
        exit_ = await asyncio.shield(self._exit)
        await asyncio.wait([lines.closed for _, lines in self._outputs], timeout=DRAIN_SECONDS)
        for transport, _ in self._outputs:
            transport.close()
        self._writer.close()
        await self._writer.wait_closed()
        if exit_ is not None:
            return exit_
        assert self._status is not None
        status, memory_ran_out = self._status
        return classify(status, self._last_message, memory_ran_out=memory_ran_out)

    def forked(self, pid: int) -> None:
        """Record the process id that the fork server reports."""
        self.pid = pid
        self._is_known.set()

    @property
    def running_pid(self) -> int | None:
        """``pid`` while the process is not known to have ended; after that it may be another's."""
        return None if self._exit.done() else self.pid

    def exited(self, status: int, kills: OutOfMemoryKills) -> None:
        """Record the exit status that the fork server reports. The last messages may still be in the socket."""
        self._status = status, status == -signal.SIGKILL and kills.claim()
        self.ended(None)

    def ended(self, exit_: WorkerExit | None) -> None:
        """Record that the process has ended: as ``exit_`` says, or else as its status and last message show."""
        if not self._exit.done():
            self._exit.set_result(exit_)
            self._is_known.set()
            # A process of the user's that inherited the socket could hold it open.
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._writer.close)
