"""The templates of a fork server, and the workers that are being forked from them.

A template is the user's code in the end: it may die, hang or be stopped at any moment. So the fork server never waits
for it. A worker that it asks for has to report to the fork server, over a socket of its own, and gets its answer there;
if the template ends first, or does nothing for `FORK_SECONDS`, it is killed, with all it has started, and the workers
that have not reported are handed back, to be forked without a template.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from .descendants import Process, kill, kill_session
from .fork_protocol import (
    MAX_PACKET_BYTES,
    TemplateContent,
    TemplateExited,
    TemplateKillRequest,
    TemplateLoaded,
    response,
)
from .forked import Entry
from .template import GO, run_template

FORK_SECONDS = 3.0
"""A template that has been asked for a worker and does nothing for this many seconds is killed."""


@dataclass
class NewWorker:
    """A worker that a template was asked for."""

    process: int
    descriptors: list[int]
    ready: socket.socket
    is_killed: bool = False

    def close(self) -> None:
        """Close what belongs to it here."""
        self.ready.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass
class _Template:
    pid: int
    control: socket.socket
    is_ready: bool = False
    heard: float = 0.0
    """When the template last did something, on the monotonic clock."""
    workers: list[NewWorker] = field(default_factory=list)


@dataclass(frozen=True)
class Forked:
    """A worker is there, as a child of this process."""

    process: int
    pid: int


@dataclass(frozen=True)
class NotForked:
    """A worker could not be forked from its template."""

    worker: NewWorker


Outcome = Forked | NotForked | TemplateLoaded | TemplateExited


class TemplateForks:
    """The templates of this process, which is a fork server. `poll` yields the outcomes of all requests."""

    def __init__(self, poller: "select.poll") -> None:
        self._poller = poller
        self._templates: dict[int, _Template] = {}
        self._released: set[int] = set()
        """Process ids of the workers that were released to run; one may still be in its template's session."""
        self._outcomes: list[Outcome] = []

    def prepare(self, number: int, content: TemplateContent, entry: Entry, *, close: Callable[[], None]) -> None:
        """Start a template; ``close`` closes in it what it must not have of this process."""
        fork_server = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            self._outcomes.append(TemplateExited(template=number, reason=f"the system refused a process: {error}"))
            return
        if pid == 0:

            def close_all() -> None:
                close()
                ours.close()
                self.close_all()

            run_template(number, content, theirs, entry, fork_server=fork_server, close=close_all)
        theirs.close()
        ours.setblocking(False)
        self._poller.register(ours, select.POLLIN)
        self._templates[number] = _Template(pid, ours)

    def end(self, request: TemplateKillRequest) -> None:
        """Kill a template; the workers that it was asked for are handed back."""
        self._end(request.template, "it was ended", is_told=False)

    def fork(self, number: int, process: int, descriptors: list[int]) -> None:
        """Ask a template for a worker."""
        ours, theirs = socket.socketpair()
        worker = NewWorker(process, descriptors, ours)
        template = self._templates.get(number)
        with theirs:
            if template is None or not template.is_ready:
                self._outcomes.append(NotForked(worker))
                return
            template.heard = template.heard if template.workers else time.monotonic()
            template.workers.append(worker)
            self._poller.register(ours, select.POLLIN)
            try:
                socket.send_fds(template.control, [b"fork"], [*descriptors, theirs.fileno()])
            except OSError as error:  # it has ended, or reads nothing
                self._end(number, f"the template takes no request: {error}")

    def kill(self, process: int) -> None:
        """Kill a worker as soon as it is there."""
        requested = [worker for template in self._templates.values() for worker in template.workers]
        handed_back = [outcome.worker for outcome in self._outcomes if isinstance(outcome, NotForked)]
        for worker in (*requested, *handed_back):
            worker.is_killed = worker.is_killed or worker.process == process

    def poll(self, readable: set[int]) -> Iterator[Outcome]:
        """Handle what templates and new workers sent, and what they failed to send; yield what has happened.

        What is not yielded yet still belongs to this: `close_all` closes it in a child that is forked meanwhile.
        """
        for number, template in list(self._templates.items()):
            if template.control.fileno() in readable:
                self._read_template(number, template)
            if number not in self._templates:
                continue
            for worker in list(template.workers):
                if worker.ready.fileno() in readable:
                    self._read_worker(number, template, worker)
            if template.workers and time.monotonic() - template.heard > FORK_SECONDS:
                self._end(number, f"the template did not answer for {FORK_SECONDS:g} seconds")
        while self._outcomes:
            yield self._outcomes.pop(0)

    @property
    def seconds_left(self) -> float | None:
        """How soon `poll` has to be called, whatever is readable; None: not at all."""
        due = [template.heard + FORK_SECONDS for template in self._templates.values() if template.workers]
        return 0.0 if self._outcomes else max(0.0, min(due) - time.monotonic() + 0.001) if due else None

    def ended(self, pid: int, how: str) -> None:
        """A child has ended: a template, a worker, or neither."""
        self._released.discard(pid)
        for number, template in list(self._templates.items()):
            if template.pid == pid:
                while number in self._templates and self._read_template(number, template):
                    pass
                self._end(number, f"the template ended: {how}")

    def owns(self, process: Process) -> bool:
        """Whether a child of this process is a template or a new worker that has not reported yet."""
        return any(template.pid in (process.pid, process.session) for template in self._templates.values())

    def close_all(self) -> None:
        """In a child: close what belongs to templates here, and to workers that they could not fork."""
        for template in self._templates.values():
            template.control.close()
            for worker in template.workers:
                worker.close()
        for outcome in self._outcomes:
            if isinstance(outcome, NotForked):
                outcome.worker.close()

    def _read_template(self, number: int, template: _Template) -> bool:
        """Read what a template reports about itself; return whether there was something."""
        try:
            packet = template.control.recv(MAX_PACKET_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return False
        if not packet:
            self._unregister(template.control)  # its end follows
            return False
        try:
            message = response.validate_json(packet)
        except ValueError:
            message = TemplateExited(template=number, reason="the template sent a malformed message", is_refused=True)
        match message:
            case TemplateLoaded(template=named) if named == number and not template.is_ready:
                template.is_ready = True
                self._outcomes.append(message)
            case TemplateExited(reason=reason, is_refused=is_refused):
                self._end(number, reason, is_refused=is_refused)
            case _:
                self._end(number, "the template sent an unexpected message", is_refused=True)
        return True

    def _read_worker(self, number: int, template: _Template, worker: NewWorker) -> None:
        """Read the process id of a new worker, and let it run."""
        packet = worker.ready.recv(16)
        template.heard = time.monotonic()
        template.workers.remove(worker)
        self._poller.unregister(worker.ready)
        if not (packet.isdigit() and _is_child(int(packet))):
            self._outcomes.append(NotForked(worker))
            return
        if worker.is_killed:
            kill(int(packet))
        self._released.add(int(packet))
        self._outcomes.append(Forked(worker.process, int(packet)))
        with suppress(OSError):  # it was killed: its end follows
            worker.ready.send(GO)
        worker.close()

    def _end(self, number: int, reason: str, *, is_refused: bool = False, is_told: bool = True) -> None:
        template = self._templates.pop(number, None)
        if template is None:
            return
        kill(template.pid)
        kill_session(template.pid, keep=self._released)
        self._unregister(template.control)
        template.control.close()
        for worker in template.workers:
            self._poller.unregister(worker.ready)
            self._outcomes.append(NotForked(worker))
        if is_told:
            self._outcomes.append(TemplateExited(template=number, reason=reason, is_refused=is_refused))

    def _unregister(self, connection: socket.socket) -> None:
        with suppress(KeyError):
            self._poller.unregister(connection)


def _is_child(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1]) == os.getpid()
    except OSError:
        return False
