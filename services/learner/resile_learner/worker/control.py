"""What the main thread of a worker asks of its control thread."""

import socket
from collections.abc import Callable
from typing import TypeVar

from resile_shared.messages.reports import Evidence

from ..collectives.mesh import Mesh
from ..membership import Event, Membership, Switch
from ..messages import Message, WorkerConfig, encode
from ..phases import Phases
from .control_thread import ControlThread

T = TypeVar("T")


class Control:
    """Starts and owns the control thread; every method is for the main thread."""

    def __init__(self, config: WorkerConfig, agent: socket.socket, mesh: Mesh) -> None:
        self._thread = ControlThread(config, agent, mesh)

    def start(self) -> None:
        """Start the thread; return when this worker can be dialed."""
        self._thread.start()
        self.wait_for(lambda membership: self._thread.listening or None)

    def post(self, event: Event) -> Switch | None:
        """Feed the membership an event of the main thread."""
        return self._thread.post(event)

    def wait_for(self, question: Callable[[Membership], T | None]) -> T:
        """Block until ``question`` has an answer that is not None. Raises what stopped the control thread."""
        return self._thread.wait_for(question)

    def ask(self, question: Callable[[Membership], T]) -> T:
        """Return the answer as it is now."""
        return self._thread.ask(question)

    @property
    def phases(self) -> Phases:
        """Where the main thread says what it is doing; it is watched."""
        return self._thread.phases

    @property
    def pause_asked(self) -> bool:
        """Whether the agent wants a checkpoint now, and no further iteration."""
        return self._thread.pause_asked

    @property
    def started(self) -> bool:
        """Whether the founding generation was formed here."""
        return self._thread.started

    def report(self, message: Message) -> None:
        """Send a message to the agent."""
        self._thread.call(self._thread.write_to_agent, encode(message))

    def check_link(self, peer: int) -> None:
        """Count the link to ``peer`` as down, and make it anew, if its data connection is known to be broken."""
        self._thread.call(self._thread.check_link, peer)

    def accuse(self, suspect: int, evidence: Evidence, reason: str) -> None:
        """Accuse ``suspect`` before the agent, and again and again until a newer generation is in force."""
        self._thread.call(self._thread.accuse, suspect, evidence, reason)

    def close_links(self) -> None:
        """Tell all peers, by closing the control links, that this worker is gone."""
        self._thread.call(self._thread.close_peers)

    def close(self) -> None:
        """Send what is still unsent to the agent, and end the thread."""
        self._thread.stop()
