"""The connection to its agent of a worker that needs no control thread: one of a gang, or a replica."""

import os
import socket
import threading
from collections.abc import Callable

from ..messages import Message, Order, Pause, Stop, encode, to_worker

CLOSE_SECONDS = 2.0


class AgentConnection:
    """Sends messages, and receives orders."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._lines = connection.makefile("rb")
        self._has_ended = threading.Event()
        self._is_closing = False

    def send(self, message: Message) -> None:
        """Send a message."""
        self._socket.sendall(encode(message))

    def wait_for_order(self, worker: int) -> Order:
        """Return the first order that names ``worker``; the process ends if there will be none."""
        while line := self._lines.readline():
            message = to_worker.validate_json(line)
            if isinstance(message, Order) and worker in message.workers:
                return message
            if isinstance(message, Stop):
                os._exit(0)
        os._exit(1)  # the agent is gone, and with it the only source of orders

    def obey(self, on_order: Callable[[Order | Pause], None] = lambda _: None) -> None:
        """Pass on what the agent sends, and end the process when it says so, or is gone."""
        while line := self._lines.readline():
            message = to_worker.validate_json(line)
            if isinstance(message, Stop):
                os._exit(0)
            on_order(message)
        self._has_ended.set()
        if not self._is_closing:
            os._exit(1)

    def close(self) -> None:
        """Let the agent read everything, and close."""
        self._is_closing = True
        self._socket.shutdown(socket.SHUT_WR)
        self._has_ended.wait(CLOSE_SECONDS)
