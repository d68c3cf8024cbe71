"""The fork server that workers are forked from: `python -m resile_learner.processes.fork_server --fd N --parent PID`.

It imports torch once, so that a worker starts in milliseconds; it computes nothing and has one thread, because a fork
copies only the thread that calls it. It also holds on to everything below it:

- A worker dies with the fork server (`PR_SET_PDEATHSIG`, armed again after the fork).
- When a worker ends, by itself or not, all that it started is killed before its end is reported, daemons too. Then its
  temporary files are removed.
- When the parent (the agent, or `resile run`) ends, its side of the socket closes (and SIGTERM comes as the
  parent-death signal, should a copy of the socket survive somewhere). The fork server then kills all its descendants,
  being their subreaper, removes its scratch folder and exits. It does not die at once with the parent, since nothing
  would be left to find what the user's script had started.
- Templates (template.py) are forked from it, and workers from them; those too are its children.
- A child that describes the accelerators of this machine may compute, as workers do.
- A SIGTERM or Ctrl-C that comes while the parent lives has no effect, here and in workers: whoever sends it to all
  processes, as systemd does, leaves it to the parent what is saved before they end.
- During the imports there is nothing below it yet, and it reads no requests: then SIGTERM ends it at once.
"""

import argparse
import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from resile_shared.processes import raise_descriptor_limit

from ..messages import Message
from .descendants import (
    JANITOR_SECONDS,
    adopt_orphans,
    die_with_parent,
    kill,
    kill_all,
    kill_strays,
    signal_on_parent_death,
)
from .fork_protocol import (
    FORK_DESCRIPTORS,
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
    TemplateKillRequest,
    TemplateRequest,
    request,
)
from .forked import Entry, adopt, end_library_threads, exit_with, open_outputs, reset_signals
from .scratch import Scratch
from .template_forks import Forked, NotForked, TemplateForks

MAX_ERROR, MAX_DETAILS = 1000, 8000  # characters: escaped, both fit into a packet
DEFAULT_ENTRY = "resile_learner.worker.bootstrap:main"
DEVICES = "resile_learner.devices"
PRELOAD = (
    "numpy",
    "torch",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",  # the first optimizer imports it, which takes a second
    # All of the learner that `resile.training` imports: an upgrade under a running pool mixes no two versions.
    "resile_learner.datasets.paths",
    "resile_learner.training.model",
    "resile_learner.training.preload",
    "resile_learner.training.prepare",
    "resile_learner.training.script_state",
)


class ForkServer:
    """The loop of the fork server: requests and signals in, forks and exits out."""

    def __init__(
        self, control: socket.socket, entry: Entry, scratch: Scratch, inherited: Sequence[int], *, parent: int
    ) -> None:
        self._parent = parent
        self._control = control
        self._entry = scratch.in_own_folder(entry)
        self._scratch = scratch
        self._inherited = [scratch.lock, *inherited]
        self._pid = os.getpid()
        self._workers: dict[int, int] = {}
        """The client's number of each worker, by process id."""
        self._describers: set[int] = set()
        """Process ids of children that describe the devices of this machine."""
        self._wakeup, self._wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._janitor_deadline: float | None = None
        """When the janitors of workers that have ended are killed."""
        self._ended = False
        self._poller = select.poll()
        self._templates = TemplateForks(self._poller)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # handled, so that it wakes the loop
        signal.signal(signal.SIGTERM, self._end)

    def run(self) -> None:
        """Serve until the parent has ended."""
        self._send(Preloaded())
        self._poller.register(self._control, select.POLLIN)
        self._poller.register(self._wakeup, select.POLLIN)
        while not self._ended:
            ready = {descriptor for descriptor, _ in self._poller.poll(self._poll_milliseconds())}
            self._poll_templates(ready)  # first: a worker that is reaped has been heard of
            if self._wakeup in ready:
                os.read(self._wakeup, 4096)
                self._reap()
            if self._control.fileno() in ready:
                self._read_request()

    def _poll_milliseconds(self) -> float | None:
        """Return how long to wait for the next event; end the janitors whose time is over."""
        left = [self._templates.seconds_left]
        if self._janitor_deadline is not None:
            left.append(self._janitor_deadline - time.monotonic())
            if left[-1] is not None and left[-1] <= 0:
                self._janitor_deadline = left[-1] = None
                kill_strays(self._kept, spare_janitors=False, is_known=self._templates.owns)
        seconds = [each for each in left if each is not None]
        return 1000 * min(seconds) if seconds else None

    @property
    def _kept(self) -> set[int]:
        """The children that are not strays, besides those of templates."""
        return {*self._workers, *self._scratch.removers, *self._describers}

    def _poll_templates(self, readable: set[int]) -> None:
        """Report what templates did, and fork without a template the workers that they could not fork."""
        for outcome in self._templates.poll(readable):
            match outcome:
                case Forked(process, pid):
                    self._workers[pid] = process
                    self._send(ProcessForked(process=process, pid=pid))
                case NotForked(worker):
                    worker.ready.close()  # before the fork: the worker does not need it
                    self._fork(worker.process, worker.descriptors)
                    if worker.is_killed:
                        self._kill(worker.process)
                case _:
                    self._send(outcome)

    def _end(self, signum: int, frame: FrameType | None) -> None:
        """The parent is gone, or everybody got this signal, and the parent says when to end."""
        self._ended = self._ended or os.getppid() != self._parent

    def _read_request(self) -> None:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, len(FORK_DESCRIPTORS))
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._ended = True
            return
        match request.validate_json(packet):
            case ForkRequest(process=process, template=None):
                self._fork(process, descriptors)
            case ForkRequest(process=process, template=int(template)):
                self._templates.fork(template, process, descriptors)
            case KillRequest(process=process):
                self._kill(process)
            case TemplateRequest(template=template):
                self._prepare(template, descriptors)
            case TemplateKillRequest() as end:
                self._templates.end(end)
            case DevicesRequest(env=env):
                self._describe_devices(env, descriptors)

    def _kill(self, process: int) -> None:
        self._templates.kill(process)
        for pid, other in self._workers.items():
            if other == process:
                kill(pid)

    def _prepare(self, template: int, descriptors: list[int]) -> None:
        with open(descriptors[0], "rb") as file:
            content = TemplateContent.model_validate_json(file.read())
        self._templates.prepare(template, content, self._entry, close=self._close_in_child)

    def _close_in_child(self) -> None:
        for descriptor in (self._wakeup, self._wakeup_writer, self._control.detach(), *self._inherited):
            os.close(descriptor)

    def _fork(self, process: int, descriptors: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._send(ForkRefused(process=process, reason=str(error)))
        else:
            if pid == 0:
                self._become_worker(descriptors)
            self._workers[pid] = process
            self._send(ProcessForked(process=process, pid=pid))
        for descriptor in descriptors:
            os.close(descriptor)

    def _become_worker(self, descriptors: list[int]) -> None:
        """In the child: become a worker, run it, and end the process."""

        def main() -> int:
            die_with_parent(self._pid)
            adopt_orphans()
            os.setsid()
            reset_signals()
            self._close_in_child()
            self._templates.close_all()
            config, agent = adopt(descriptors)
            open_outputs()
            return self._entry(config.model_copy(update={"template": None}), agent)

        exit_with(main)

    def _describe_devices(self, env: Mapping[str, str], descriptors: list[int]) -> None:
        def main() -> int:
            die_with_parent(self._pid)
            reset_signals()
            self._close_in_child()
            self._templates.close_all()
            os.dup2(descriptors[0], 1)
            open_outputs()
            os.environ.update(env)
            importlib.import_module(DEVICES).print_devices()
            return 0

        with contextlib.suppress(OSError):  # the system refuses another process: the pipe ends without a word
            pid = os.fork()
            if pid == 0:
                exit_with(main)
            self._describers.add(pid)
        os.close(descriptors[0])

    def _reap(self) -> None:
        """Report the workers that have ended, and reap every child that has."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            is_worker = ended.si_pid in self._workers
            if is_worker and kill_strays(self._kept, is_known=self._templates.owns):
                self._janitor_deadline = self._janitor_deadline or time.monotonic() + JANITOR_SECONDS
            process = self._workers.pop(ended.si_pid, None)
            self._scratch.removers.discard(ended.si_pid)
            self._describers.discard(ended.si_pid)
            _, raw = os.waitpid(ended.si_pid, 0)
            status = os.waitstatus_to_exitcode(raw)
            self._templates.ended(ended.si_pid, f"exit status {status}" if status >= 0 else f"signal {-status}")
            if process is not None:
                self._send(ProcessExited(process=process, status=status))
                self._scratch.remove_own_folder(ended.si_pid)  # last: training waits for the report

    def _send(self, message: Message) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended: the next read shows it
            self._control.send(message.model_dump_json().encode())


def _preload(modules: Sequence[str], entry: str) -> Entry:
    gc.disable()  # all that is imported stays: a collector that looks for garbage meanwhile takes a third of the time
    for name in modules:
        importlib.import_module(name)
    module, _, function = entry.partition(":")
    loaded: Entry = getattr(importlib.import_module(module), function)
    end_library_threads()
    gc.collect()
    gc.freeze()  # so that a worker's collector does not touch, and thereby copy, every page
    gc.enable()
    return loaded


def _remove_staged(folder: Path) -> None:
    """Remove what a writer that was killed left: a local object store writes to ``name#1`` and renames that."""
    for path in folder.rglob("*#*"):
        if path.name.rpartition("#")[2].isdigit():
            path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Import, then serve the client at the other end of ``--fd`` until it has ended."""
    options = _parse(arguments)
    raise_descriptor_limit()  # also for the workers
    scratch = Scratch()
    _exit_with_parent(options.parent, scratch)
    control = socket.socket(fileno=options.fd)
    try:
        entry = _preload([name for name in options.preload.split(",") if name], options.entry)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"[:MAX_ERROR]
        fault = PreloadFailed(error=reason, details=traceback.format_exc()[-MAX_DETAILS:])
        control.send(fault.model_dump_json().encode())
        scratch.remove()
        return 1
    inherited = [int(descriptor) for descriptor in options.inherited.split(",") if descriptor]
    adopt_orphans()
    try:
        ForkServer(control, entry, scratch, inherited, parent=options.parent).run()
    finally:
        kill_all()
        scratch.remove()
        if options.storage is not None:
            _remove_staged(options.storage)
    return 0


def _exit_with_parent(parent: int, scratch: Scratch) -> None:
    """Until there are workers, exit as soon as the parent does."""

    def leave(signum: int, frame: FrameType | None) -> None:
        scratch.remove()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    signal_on_parent_death(signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The fork server that workers are forked from.")
    parser.add_argument("--fd", type=int, required=True, help="this side of a SOCK_SEQPACKET pair")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--inherited", default="", help="descriptors to keep open here, and to close in workers")
    parser.add_argument("--storage", type=Path, help="the storage, if it is a folder: half-written objects are removed")
    parser.add_argument("--entry", default=DEFAULT_ENTRY, help="module:function that a worker runs")
    parser.add_argument("--preload", default=",".join(PRELOAD), help="modules to import first, with commas between")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
