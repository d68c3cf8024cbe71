"""Starts a fork server, requests workers from it, and notices when it ends."""

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from resile_shared.errors import ResileError
from resile_shared.messages.hosts import WorkerExit

from ..messages import WorkerConfig
from .descendants import kill, kill_session
from .exits import OutOfMemoryKills, classify
from .fork_protocol import (
    MAX_PACKET_BYTES,
    DevicesRequest,
    ForkRefused,
    ForkRequest,
    KillRequest,
    Preloaded,
    PreloadFailed,
    ProcessExited,
    ProcessForked,
    TemplateContent,
    TemplateExited,
    TemplateKillRequest,
    TemplateLoaded,
    TemplateRequest,
    process_name,
    response,
)
from .scratch import remove_stale
from .worker_process import OnOutput, WorkerProcess

OnTemplate = Callable[[TemplateLoaded | TemplateExited], None]

CLOSE_SECONDS = 15.0
RETRY_SECONDS = 0.01
MAX_DETAILS = 4000
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # strings hash alike in all workers
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # an import that asks whether there is a GPU must not open it before the fork
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch reads it once, at the first matrix product
}
"""Variables that every worker has in its environment."""


@dataclass(frozen=True)
class ForkServerSettings:
    """How a fork server is started; the defaults are those of real training."""

    entry: str | None = None
    preload: Sequence[str] | None = None
    storage: Path | None = None
    """The storage, if it is a folder: half-written objects are removed from it at the end."""
    inherit: Sequence[int] = ()
    """Descriptors that the fork server keeps open for its whole life, and that workers close."""
    environment: Mapping[str, str] | None = None
    """Environment that the fork server and its workers inherit; None: this process's own environment."""
    python: str = sys.executable
    """The Python interpreter, and with it the installed packages."""

    def command(self, descriptor: int) -> list[str]:
        """Return the command line of a fork server whose end of the socket is ``descriptor``."""
        command = [self.python, "-P", "-m", "resile_learner.processes.fork_server", f"--fd={descriptor}"]
        command += [f"--parent={os.getpid()}", f"--inherited={','.join(map(str, self.inherit))}"]
        if self.storage is not None:
            command.append(f"--storage={self.storage}")
        if self.entry is not None:
            command.append(f"--entry={self.entry}")
        if self.preload is not None:
            command.append(f"--preload={','.join(self.preload)}")
        return command


class ForkServerClient:
    """A fork server and the workers forked from it. Make one with `ForkServerClient.start`, and always `close` it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, log: Path) -> None:
        self._process = process
        self._control = control
        self._log = log
        self._workers: dict[int, WorkerProcess] = {}
        self._templates: dict[int, OnTemplate] = {}
        self._numbers = itertools.count()
        self._num_connecting = 0
        """Number of workers that are requested and not in ``_workers`` yet."""
        self._loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._fault = WorkerExit(kind="abandoned")
        """The exit of all workers when the fork server has ended."""
        self._kills = OutOfMemoryKills()
        self._open = True
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process_descriptor = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(control, self._receive)
        asyncio.get_running_loop().add_reader(self._process_descriptor, self._on_end)

    @classmethod
    async def start(cls, *, log: Path, settings: ForkServerSettings | None = None) -> "ForkServerClient":
        """Start a fork server whose own output goes to ``log``. Forks requested before it is loaded wait for that.

        Call it from the thread that lives longest: the kernel counts that thread's end as the parent's.
        """
        settings = settings or ForkServerSettings()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, _open_log(log) as output:
            process = subprocess.Popen(  # noqa: ASYNC220 - a few ms; the parent-death signal needs this very thread
                settings.command(theirs.fileno()),
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
        """Process id of the fork server."""
        return self._process.pid

    @property
    def is_idle(self) -> bool:
        """Whether it has neither workers nor templates, and is asked for none."""
        return not (self._workers or self._templates or self._num_connecting)

    async def loaded(self) -> None:
        """Wait until everything is imported. Raises ResileError if that fails."""
        await asyncio.shield(self._loaded)

    async def fork(self, config: WorkerConfig, on_output: OnOutput) -> WorkerProcess:
        """Request a worker. Messages can be sent to it at once; if it cannot be started, its exit says so."""
        number = next(self._numbers)
        self._num_connecting += 1
        try:
            theirs, worker = await WorkerProcess.connect(config.worker, on_output, partial(self._kill, number))
        finally:
            self._num_connecting -= 1
        with contextlib.ExitStack() as stack:
            for descriptor in theirs:
                stack.callback(os.close, descriptor)
            name = process_name(config.job, config.worker)
            configuration = _memory_file(stack, name, config.model_dump_json().encode())
            self._workers[number] = worker
            if self._open:
                await self._send(ForkRequest(process=number, template=config.template), [configuration, *theirs])
            else:
                self._abandon(number)
        return worker

    async def describe_devices(self, env: Mapping[str, str]) -> bytes:
        """Return what `resile_learner.devices` prints in a child of the fork server with ``env``.

        Empty if the fork server has ended, or cannot fork. Raises ResileError if it cannot be loaded.
        """
        await self.loaded()
        ours, theirs = socket.socketpair()
        with theirs:
            described, connection = await asyncio.open_connection(sock=ours)
            with contextlib.closing(connection):
                await self._send(DevicesRequest(env=dict(env)), [theirs.fileno()])
                theirs.close()  # the end comes when the child has exited
                return await described.read()

    async def prepare_template(self, number: int, content: TemplateContent, on_template: OnTemplate) -> None:
        """Start template ``number``, which no other has; ``on_template`` is called when it is ready, and when it ends.

        A template that `end_template` ends is not reported. Raises OSError if no file can be opened.
        """
        if not self._open:
            on_template(_lost_template(number))
            return
        with contextlib.ExitStack() as stack:
            file = _memory_file(stack, f"resile-template:{number}", content.model_dump_json().encode())
            self._templates[number] = on_template
            await self._send(TemplateRequest(template=number), [file])

    async def end_template(self, number: int) -> None:
        """Kill a template, but no worker that was forked from it."""
        if self._templates.pop(number, None) and self._open:
            await self._send(TemplateKillRequest(template=number), [])

    async def close(self) -> None:
        """Kill every worker and all they started, and the fork server; return when they are gone. Idempotent."""
        if not self._loaded.done():
            self._process.terminate()  # it does not read requests during the imports, and nothing is below it yet
        self._disconnect()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.ended()
        except TimeoutError:
            self._process.kill()
            await self.ended()
        self._abandon_all()
        await asyncio.to_thread(remove_stale)  # its own folder, if it was killed

    async def ended(self) -> None:
        """Wait for the end of the process, whatever causes it."""
        await asyncio.shield(self._ended)

    def _on_end(self) -> None:
        """The process has ended: the messages that it sent before say why, and how its workers ended."""
        asyncio.get_running_loop().remove_reader(self._process_descriptor)
        os.close(self._process_descriptor)
        self._process.wait()
        try:
            while self._open and self._receive():
                pass
            if self._open:
                self._lost()
        finally:
            self._ended.set_result(None)

    async def _send(
        self,
        message: ForkRequest | TemplateRequest | TemplateKillRequest | DevicesRequest,
        descriptors: Sequence[int],
    ) -> None:
        packet = message.model_dump_json().encode()
        while True:
            try:
                socket.send_fds(self._control, [packet], descriptors)
                return
            except BlockingIOError:
                await asyncio.sleep(RETRY_SECONDS)
            except OSError:
                return  # the fork server has ended: `_on_end` sees that

    def _kill(self, number: int) -> None:
        """Have the fork server kill a worker and its session: only a parent can be sure of a process id."""
        if not self._open:
            return
        try:
            self._control.send(KillRequest(process=number).model_dump_json().encode())
        except BlockingIOError:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._kill, number)
        except OSError:
            return  # the fork server has ended: `_on_end` sees that

    def _receive(self) -> bool:
        """Handle the next message of the fork server; return whether there may be another one now."""
        try:
            packet = self._control.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True  # a reset comes before what was sent before it
        if not packet:
            asyncio.get_running_loop().remove_reader(self._control)  # the end of the process follows
            return False
        match response.validate_json(packet):
            case Preloaded():
                self._loaded.set_result(None)
            case PreloadFailed(error=error, details=details):
                message = f"what training needs could not be imported: {error}"
                self._fault = WorkerExit(kind="not started", message=message, details=details)
            case ProcessForked(process=number, pid=pid):
                self._workers[number].forked(pid)
            case TemplateLoaded() | TemplateExited() as report:
                self._on_template(report)
            case ForkRefused(process=number, reason=reason):
                message = f"the system refused another process: {reason}"
                self._workers.pop(number).ended(WorkerExit(kind="not started", message=message))
            case ProcessExited(process=number, status=status):
                self._workers.pop(number).exited(status, self._kills)
        return True

    def _disconnect(self) -> None:
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()

    def _lost(self) -> None:
        """The fork server has ended: the kernel kills its workers, and their sessions are killed here."""
        self._disconnect()
        tail = ""
        with contextlib.suppress(OSError):  # the folder may be gone
            tail = self._log.read_text(errors="replace")[-MAX_DETAILS:]
        if self._loaded.done():
            self._fault = WorkerExit(kind="orphaned", details=tail)
        else:
            if self._fault.kind == "abandoned":
                how = classify(self._process.returncode, None, memory_ran_out=self._kills.claim())
                message = f"during its imports {how.describe('the fork server')}"
                self._fault = WorkerExit(kind="not started", message=message, details=tail)
            self._loaded.set_exception(ResileError(self._fault.message))
            self._loaded.exception()  # retrieved: every worker's exit reports it as well
        self._abandon_all()

    def _on_template(self, report: TemplateLoaded | TemplateExited) -> None:
        is_over = isinstance(report, TemplateExited)
        on_template = self._templates.pop(report.template, None) if is_over else self._templates.get(report.template)
        if on_template is not None:  # else it was ended meanwhile
            on_template(report)

    def _end_templates(self) -> None:
        """Report the end of all templates: they die with the fork server."""
        while self._templates:
            number, on_template = self._templates.popitem()
            on_template(_lost_template(number))

    def _abandon_all(self) -> None:
        self._end_templates()
        for number in list(self._workers):
            self._abandon(number)

    def _abandon(self, number: int) -> None:
        worker = self._workers.pop(number)
        if worker.pid is not None:
            kill(worker.pid)
            kill_session(worker.pid)
        worker.ended(self._fault)


def _lost_template(number: int) -> TemplateExited:
    return TemplateExited(template=number, reason="its fork server ended")


def _memory_file(stack: contextlib.ExitStack, name: str, content: bytes) -> int:
    """Return the descriptor of a memory file, which ``stack`` closes."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _open_log(path: Path) -> IO[bytes]:
    """Open an empty log. It is appended to, so that others can truncate it at any time."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666), "wb")
