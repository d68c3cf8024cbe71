"""``python -m resile_shared.testing.mortal NAME``: forks processes of a service that die where they are told to.

One wish a line comes in (``number``, ``flags``, ``fatal``, ``log``); out go the process id of each, and how it ended.
"""

import json
import os
import select
import signal
import sys
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from nats.aio.msg import Msg

from ..connection import Connection
from ..parent_death import dying_with_parent
from ..service import main


class Point(NamedTuple):
    """A point in the work of a service: ``when`` is ``before`` or ``after`` the ``number``-th ``deed``, a subject."""

    when: str
    deed: str
    number: int


class Mortal:
    """Dies at ``fatal``, if there is one, and notes each point that it passes in ``log``."""

    def __init__(self, fatal: Point | None, log: Path) -> None:
        self._fatal = fatal
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._counts: Counter[str] = Counter()

    def install(self) -> None:
        """Look at all that connections of this process store, say, ask and answer."""
        request, send = Connection.request, Connection.send

        async def mortal_request(
            connection: Connection, subject: str, body: bytes, *, headers: dict[str, str] | None = None
        ) -> Msg:
            if subject.startswith("$JS."):  # it only looks
                return await request(connection, subject, body, headers=headers)
            number = self._begin(subject)
            answer = await request(connection, subject, body, headers=headers)
            self._pass(Point("after", subject, number))
            return answer

        async def mortal_send(
            connection: Connection, subject: str, body: bytes, *, headers: dict[str, str], reply: str = ""
        ) -> bool:
            if reply:
                return await send(connection, subject, body, headers=headers, reply=reply)
            deed = "answer" if subject.startswith("_INBOX") else subject
            number = self._begin(deed)
            sent = await send(connection, subject, body, headers=headers)
            if self._fatal == Point("after", deed, number):
                await connection.flush()
            self._pass(Point("after", deed, number))
            return sent

        Connection.request = mortal_request  # type: ignore[method-assign, assignment]
        Connection.send = mortal_send  # type: ignore[method-assign, assignment]

    def _begin(self, deed: str) -> int:
        self._counts[deed] += 1
        self._pass(Point("before", deed, self._counts[deed]))
        return self._counts[deed]

    def _pass(self, point: Point) -> None:
        os.write(self._log, json.dumps(point).encode() + b"\n")
        if point == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def fork_as_wished(name: str) -> None:
    """Fork processes until nobody wishes any more; they die with this one."""
    import_module(f"resile_{name}.service")
    import_module(f"resile_{name}.settings")
    arm = dying_with_parent()
    ring, bell = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(bell)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffer = b""
    while True:
        ready, _, _ = select.select([0, ring], [], [])
        if ring in ready:
            os.read(ring, 4096)
            _tell_who_ended()
        if 0 in ready:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            for wish in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    arm()
                    _serve(name, wish)
                _say({"number": wish["number"], "pid": pid})


def _tell_who_ended() -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _say({"pid": ended[0], "status": os.waitstatus_to_exitcode(ended[1])})


def _say(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _serve(name: str, wish: dict[str, Any]) -> None:
    """Be the service; never return."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        Mortal(Point(*wish["fatal"]) if wish["fatal"] else None, Path(wish["log"])).install()
        settings = getattr(import_module(f"resile_{name}.settings"), f"{name.capitalize()}Settings")
        main(name, settings, import_module(f"resile_{name}.service").run, arguments=wish["flags"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(status)


if __name__ == "__main__":
    fork_as_wished(sys.argv[1])
