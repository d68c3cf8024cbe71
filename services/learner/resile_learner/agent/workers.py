"""Worker processes as the agent sees them: started from a zygote, heard line by line, each with one clear end."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pydantic

from resile_shared.errors import ResileError

from ..messages import (
    Failed,
    Finished,
    FromWorker,
    Left,
    Message,
    Order,
    Pause,
    Stop,
    WorkerConfig,
    encode,
    from_worker,
)
from .descendants import kill, kill_session
from .exits import Exit, LastWord, classify
from .memory import OutOfMemoryKills
from .output import Lines
from .protocol import (
    MAX_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    Kill,
    Loaded,
    Refused,
    Unloadable,
    from_zygote,
    process_name,
)

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, str], None]
Pipe = tuple[asyncio.ReadTransport, Lines]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
DRAIN_SECONDS = 2.0
CLOSE_SECONDS = 15.0
RETRY_SECONDS = 0.01
MAX_DETAILS = 4000
# Strings hash alike in all workers; and an import that asks whether there is a GPU must not open it before the fork.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class MalformedMessageError(ResileError):
    """A worker wrote something to its agent's socket that is no message."""

    def __init__(self, worker: int, problem: str) -> None:
        self.worker = worker
        super().__init__(f"worker {worker} sent a malformed message: {problem}")


@dataclass(frozen=True)
class ZygoteSettings:
    """How a zygote is started; the defaults are those of real training."""

    entry: str | None = None
    preload: Sequence[str] | None = None
    storage: Path | None = None
    """The folder that workers store objects in, if it is one: it is cleaned of half-written ones in the end."""
    inherit: Sequence[int] = ()
    """Descriptors that the zygote, but no worker, keeps open for its life."""
    environment: Mapping[str, str] | None = None
    """What the zygote and its workers inherit; None: all of this process's own."""


class Zygote:
    """A warm process and the workers forked from it. Make one with `Zygote.start`, and always `close` it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, log: Path) -> None:
        self._process = process
        self._control = control
        self._log = log
        self._workers: dict[int, WorkerProcess] = {}
        self._next = 0
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fault = Exit(0, "abandoned")
        self._kills = OutOfMemoryKills()
        self._open = True
        asyncio.get_running_loop().add_reader(control, self._readable)

    @classmethod
    async def start(cls, *, log: Path, settings: ZygoteSettings | None = None) -> "Zygote":
        """Start the process; its own output goes to ``log``. Forks may be asked for at once, they wait for the imports.

        Call it from the thread that lives longest: the kernel counts that thread's end as the parent's.
        """
        settings = settings or ZygoteSettings()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-P", "-m", "resile_learner.agent.zygote", f"--fd={theirs.fileno()}"]
        command += [f"--parent={os.getpid()}", f"--inherited={','.join(map(str, settings.inherit))}"]
        if settings.storage is not None:
            command.append(f"--storage={settings.storage}")
        if settings.entry is not None:
            command.append(f"--entry={settings.entry}")
        if settings.preload is not None:
            command.append(f"--preload={','.join(settings.preload)}")
        with theirs, log.open("wb") as output:
            process = subprocess.Popen(  # noqa: ASYNC220 - a few ms; the parent-death signal needs this very thread
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**(os.environ if settings.environment is None else settings.environment), **ENVIRONMENT},
                pass_fds=(theirs.fileno(), *settings.inherit),
                start_new_session=True,  # a Ctrl-C in the terminal is for the launcher alone
            )
        return cls(process, ours, log)

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

    async def loaded(self) -> None:
        """Wait until everything is imported. Raises ResileError if that fails."""
        await asyncio.shield(self._loaded)

    async def fork(self, config: WorkerConfig, on_output: OnOutput) -> "WorkerProcess":
        """Ask for a worker. It can be talked to at once; what goes wrong with its start is told as its exit."""
        number, self._next = self._next, self._next + 1
        theirs, worker = await WorkerProcess.connect(number, config.worker, self, on_output)
        with contextlib.ExitStack() as stack:
            for descriptor in theirs:
                stack.callback(os.close, descriptor)
            configuration = os.memfd_create(process_name(config.job, config.worker), os.MFD_CLOEXEC)
            stack.callback(os.close, configuration)
            os.write(configuration, config.model_dump_json().encode())
            os.lseek(configuration, 0, os.SEEK_SET)
            self._workers[number] = worker
            if not self._open:
                self._abandon(worker)
            else:
                await self._send(Fork(process=number), [configuration, *theirs])
        return worker

    def kill(self, process: int) -> None:
        """Kill a worker and its session. The zygote does it, because only a parent can be sure of a process id."""
        if not self._open:
            return
        try:
            self._control.send(Kill(process=process).model_dump_json().encode())
        except BlockingIOError:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.kill, process)
        except OSError:
            return  # it is gone; its end is seen by `_readable`

    async def close(self) -> None:
        """Kill every worker and all they started, and the zygote; return when they are gone. May be called twice."""
        if not self._loaded.done():
            self._process.terminate()  # it does not listen during the imports, and there is nothing below it yet
        self._hang_up()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.ended()
        except TimeoutError:
            self._process.kill()
            await self.ended()
        for worker in list(self._workers.values()):
            self._abandon(worker)

    async def _send(self, message: Message, descriptors: Sequence[int]) -> None:
        packet = message.model_dump_json().encode()
        while True:
            try:
                socket.send_fds(self._control, [packet], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(RETRY_SECONDS)
            except OSError:
                return  # it is gone; its end is seen by `_readable`

    async def ended(self) -> None:
        """Wait for the end of the process, whatever causes it."""
        if self._process.poll() is not None:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        descriptor = os.pidfd_open(self._process.pid)
        loop.add_reader(descriptor, _resolve, ended)
        try:
            await ended
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._process.wait()

    def _hang_up(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()

    def _readable(self) -> None:
        try:
            packet = self._control.recv(MAX_PACKET_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return  # a reset is told before what was sent before it: that, and the end, are read next
        if not packet:
            self._lost()
            return
        match from_zygote.validate_json(packet):
            case Loaded():
                self._loaded.set_result(None)
            case Unloadable(error=error, details=details):
                self._fault = Exit(0, "not started", 0, f"what training needs could not be imported: {error}", details)
            case Forked(process=process, pid=pid):
                self._workers[process].started(pid)
            case Refused(process=process, reason=reason):
                worker = self._workers.pop(process)
                reason = f"the system refused another process: {reason}"
                worker.ended(Exit(worker.worker, "not started", 0, reason))
            case Exited(process=process, status=status):
                self._workers.pop(process).exited(status, self._kills)

    def _lost(self) -> None:
        """See to what the zygote leaves: its workers die by the kernel's word, what they started has their sessions."""
        self._hang_up()
        tail = self._log.read_text(errors="replace")[-MAX_DETAILS:]
        if self._loaded.done():
            self._fault = Exit(0, "abandoned", details=tail)
        else:
            if self._fault.kind == "abandoned":
                self._fault = Exit(0, "not started", 0, "the warm process ended during its imports", tail)
            self._loaded.set_exception(ResileError(self._fault.message))
            self._loaded.exception()  # seen: whoever waits for a worker is told as well
        for worker in list(self._workers.values()):
            self._abandon(worker)

    def _abandon(self, worker: "WorkerProcess") -> None:
        self._workers.pop(worker.number, None)
        if worker.pid is not None:
            kill(worker.pid)
            kill_session(worker.pid)
        fault = self._fault
        worker.ended(Exit(worker.worker, fault.kind, fault.status, fault.message, fault.details))


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class WorkerProcess:
    """One worker. Read `messages` to their end, then `wait`."""

    def __init__(
        self,
        number: int,
        worker: int,
        zygote: Zygote,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outputs: Sequence[Pipe],
    ) -> None:
        self.number = number
        """Under which the zygote knows it."""
        self.worker = worker
        self.pid: int | None = None
        self._zygote = zygote
        self._reader = reader
        self._writer = writer
        self._outputs = outputs
        self._last_word: LastWord = None
        self._status: tuple[int, bool] | None = None
        self._exit: asyncio.Future[Exit | None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def connect(
        cls, number: int, worker: int, zygote: Zygote, on_output: OnOutput
    ) -> "tuple[list[int], WorkerProcess]":
        """Make the channels of a worker; return its ends (agent socket, stdout, stderr) and ours, as a process."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_MESSAGE_BYTES)
        descriptors = [theirs.detach()]
        outputs: list[Pipe] = []
        streams: tuple[Stream, Stream] = ("stdout", "stderr")
        for stream in streams:
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            lines = Lines(lambda line, stream=stream: on_output(stream, line))  # type: ignore[misc]
            transport, _ = await loop.connect_read_pipe(lambda lines=lines: lines, os.fdopen(read_end, "rb", 0))  # type: ignore[misc]
            descriptors.append(write_end)
            outputs.append((transport, lines))
        return descriptors, cls(number, worker, zygote, reader, writer, outputs)

    async def messages(self) -> AsyncIterator[FromWorker]:
        """All that the worker says, until it is gone. Raises MalformedMessageError."""
        while line := await self._read_line():
            try:
                message = from_worker.validate_json(line)
            except pydantic.ValidationError as error:
                fault = error.errors()[0]
                raise MalformedMessageError(self.worker, f"{fault['msg']}, in {line[:200]!r}") from error
            if message.worker != self.worker:
                raise MalformedMessageError(self.worker, f"it signed as worker {message.worker}")
            if isinstance(message, Finished | Left | Failed):
                self._last_word = message
            yield message

    async def _read_line(self) -> bytes:
        try:
            return await self._reader.readline()
        except ValueError as error:
            raise MalformedMessageError(self.worker, f"a line longer than {MAX_MESSAGE_BYTES} bytes") from error
        except OSError:
            return b""

    def send(self, message: Order | Stop | Pause) -> None:
        """Tell the worker; one that is gone hears nothing."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    def kill(self) -> None:
        """Kill it, with all it has started."""
        self._zygote.kill(self.number)

    async def wait(self) -> Exit:
        """How it ended: all its output is delivered by then."""
        exit_ = await asyncio.shield(self._exit)
        await asyncio.wait([lines.closed for _, lines in self._outputs], timeout=DRAIN_SECONDS)
        for transport, _ in self._outputs:
            transport.close()
        self._writer.close()
        with contextlib.suppress(OSError):  # it was killed with something unread: that is no news
            await self._writer.wait_closed()
        if exit_ is not None:
            return exit_
        assert self._status is not None
        status, memory_ran_out = self._status
        return classify(self.worker, status, self._last_word, memory_ran_out=memory_ran_out)

    def started(self, pid: int) -> None:
        """Take in that the zygote has forked it."""
        self.pid = pid

    def exited(self, status: int, kills: OutOfMemoryKills) -> None:
        """Take in that the zygote has seen its end. What it said last may still be on its way."""
        self._status = status, status == -9 and kills.claim()
        self.ended(None)

    def ended(self, exit_: Exit | None) -> None:
        """Take in that nothing more will come, but for what is in the pipes."""
        if not self._exit.done():
            self._exit.set_result(exit_)
            # A stranger that inherited the socket could hold it open.
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._writer.close)
