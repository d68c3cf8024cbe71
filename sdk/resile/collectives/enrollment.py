"""How a process becomes a worker of the rendezvous: it asks, waits until the group starts, and gets an id."""

import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from resile_learner.messages import encode
from resile_shared.errors import ResileError

from .messages import Hello, Rejected, Waiting, Welcome, to_process
from .rendezvous import parse_address

RETRY_SECONDS = 0.1
REENROLL_SECONDS = 5.0
"""Seconds for which a member waits for the others before it announces itself again."""
_MAX_LINE_BYTES = 1 << 16


class JoinRefused(ResileError):
    """The rendezvous does not let this process become a member."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"the rendezvous at {address} refuses this process: {reason}")


class JoinTimeout(ResileError):
    """The group did not start, or did not admit this process, in time."""

    def __init__(self, address: str, seconds: float, reason: str) -> None:
        super().__init__(f"join: {reason} after {seconds:g} seconds (the rendezvous is {address})")


class Enrolled(NamedTuple):
    """The connection of a worker, and who it is."""

    sock: socket.socket
    welcome: Welcome


class Enrollment:
    """Asks the rendezvous at ``address`` until ``timeout`` seconds after now."""

    def __init__(self, address: str, hello: Hello, *, timeout: float) -> None:
        self.deadline = time.monotonic() + timeout
        self._address = address
        self._host, self._port = parse_address(address)
        self._hello = hello
        self._timeout = timeout

    def enroll(self) -> Enrolled:
        """Connect, and wait for an id. Raises JoinRefused or JoinTimeout."""
        while True:
            sock = self._connect()
            try:
                welcome = self._ask(sock)
            except BaseException:
                sock.close()
                raise
            if welcome is not None:
                return Enrolled(sock, welcome)
            sock.close()
            time.sleep(RETRY_SECONDS)

    def timed_out(self, reason: str) -> JoinTimeout:
        """Return the error of a join that took too long."""
        return JoinTimeout(self._address, self._timeout, reason)

    def _connect(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self._host, self._port), timeout=self._left("it cannot be reached"))
            except OSError as error:
                remedy = "start it with `python -m resile.collectives`"
                self._left(f"the rendezvous cannot be reached ({error}): {remedy}")
                time.sleep(RETRY_SECONDS)

    def _ask(self, sock: socket.socket) -> Welcome | None:
        """Return the id; None if the connection ends without one. Raises JoinRefused or JoinTimeout."""
        reason = "the rendezvous has not answered: is it frozen, or another service?"
        line = b""
        try:
            sock.sendall(encode(self._hello))
        except OSError:
            return None
        while True:
            sock.settimeout(self._left(reason))
            try:
                byte = sock.recv(1)  # no more than this line: what follows is for the control thread
            except TimeoutError:
                continue
            except OSError:
                return None
            line += byte
            if not byte or len(line) > _MAX_LINE_BYTES:
                return None
            if byte != b"\n":
                continue
            match _parse(self._address, line):
                case Welcome() as welcome:
                    sock.settimeout(None)
                    return welcome
                case Rejected(reason=refusal):
                    raise JoinRefused(self._address, refusal)
                case Waiting(present=present, size=size):
                    reason = f"{present} of {size} members have come: start the missing ones, or pass a smaller `size`"
            line = b""

    def _left(self, reason: str) -> float:
        """The seconds that are left. Raises JoinTimeout if there are none."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self.timed_out(reason)
        return left


class Reenrollment:
    """Announces a member again, on a thread of its own, when its rendezvous is back; until `take` or `close`.

    ``begin`` returns an enrollment for a number of seconds.
    """

    def __init__(self, begin: Callable[[float], Enrollment]) -> None:
        self._begin = begin
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._enrolled: Enrolled | None = None
        threading.Thread(target=self._run, name="resile-reenrollment", daemon=True).start()

    @property
    def is_enrolled(self) -> bool:
        """Whether all members have announced themselves, and the new rendezvous still serves them."""
        return self._enrolled is not None

    def take(self) -> Enrolled | None:
        """Return the connection to the new rendezvous, and leave it to the caller; None if it is lost."""
        with self._lock:
            self._is_over.set()
            enrolled, self._enrolled = self._enrolled, None
            return enrolled

    def close(self) -> None:
        """Stop announcing the member."""
        if enrolled := self.take():
            enrolled.sock.close()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                enrolled = self._begin(REENROLL_SECONDS).enroll()
            except (JoinRefused, JoinTimeout):
                self._is_over.wait(RETRY_SECONDS)
                continue
            with self._lock:
                if self._is_over.is_set():
                    enrolled.sock.close()
                    return
                self._enrolled = enrolled
            self._watch(enrolled.sock)

    def _watch(self, sock: socket.socket) -> None:
        """Return when the rendezvous has closed the connection, or at the end."""
        while not self._is_over.wait(RETRY_SECONDS):
            with self._lock:
                if self._enrolled is not None and _is_closed(sock):
                    self._enrolled = None
                    sock.close()
                    return


def _is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _parse(address: str, line: bytes) -> Waiting | Welcome | Rejected:
    try:
        return to_process.validate_json(line)
    except ValueError as error:
        raise JoinRefused(address, "the process there is not a rendezvous: check the address") from error
