"""``python -m resile_testing.crashable NAME``: forks processes of a service that crash at a chosen point.

Reads a JSON request a line (``number``, ``flags``, ``fatal``, ``log``); writes the process id and exit status of each.
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

from resile_shared.bus.connection import Connection
from resile_shared.processes import dying_with_parent
from resile_shared.service import main


class Point(NamedTuple):
    """A point in the work of a service: ``when`` is ``before`` or ``after`` the ``number``-th ``action``, a subject."""

    when: str
    action: str
    number: int


class CrashInjector:
    """Kills this process at ``fatal``, if there is one, and records each point that it passes in ``log``."""

    def __init__(self, fatal: Point | None, log: Path) -> None:
        self._fatal = fatal
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._counts: Counter[str] = Counter()

    def install(self) -> None:
        """Intercept the requests and messages that the connections of this process send."""
        request, send = Connection.request, Connection.send

        async def crashing_request(
            connection: Connection, subject: str, body: bytes, *, headers: dict[str, str] | None = None
        ) -> Msg:
            if subject.startswith("$JS."):  # a read changes nothing
                return await request(connection, subject, body, headers=headers)
            number = self._begin(subject)
            answer = await request(connection, subject, body, headers=headers)
            self._pass(Point("after", subject, number))
            return answer

        async def crashing_send(
            connection: Connection, subject: str, body: bytes, *, headers: dict[str, str], reply: str = ""
        ) -> bool:
            if reply:
                return await send(connection, subject, body, headers=headers, reply=reply)
            action = "answer" if subject.startswith("_INBOX") else subject
            number = self._begin(action)
            sent = await send(connection, subject, body, headers=headers)
            if self._fatal == Point("after", action, number):
                await connection.flush()
            self._pass(Point("after", action, number))
            return sent

        Connection.request = crashing_request  # type: ignore[method-assign, assignment]
        Connection.send = crashing_send  # type: ignore[method-assign, assignment]

    def _begin(self, action: str) -> int:
        self._counts[action] += 1
        self._pass(Point("before", action, self._counts[action]))
        return self._counts[action]

    def _pass(self, point: Point) -> None:
        os.write(self._log, json.dumps(point).encode() + b"\n")
        if point == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)


def serve_requests(name: str) -> None:
    """Fork processes until the input ends; they die with this one."""
    import_module(f"resile_{name}.service")
    import_module(f"resile_{name}.settings")
    arm = dying_with_parent()
    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    buffer = b""
    while True:
        ready, _, _ = select.select([0, wakeup_read], [], [])
        if wakeup_read in ready:
            os.read(wakeup_read, 4096)
            _report_exits()
        if 0 in ready:
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            for request in map(json.loads, lines):
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    arm()
                    _run_service(name, request)
                _write({"number": request["number"], "pid": pid})


def _report_exits() -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _write({"pid": ended[0], "status": os.waitstatus_to_exitcode(ended[1])})


def _write(document: dict[str, Any]) -> None:
    os.write(1, json.dumps(document).encode() + b"\n")


def _run_service(name: str, request: dict[str, Any]) -> None:
    """Run the service; never returns."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        CrashInjector(Point(*request["fatal"]) if request["fatal"] else None, Path(request["log"])).install()
        settings = getattr(import_module(f"resile_{name}.settings"), f"{name.capitalize()}Settings")
        main(name, settings, import_module(f"resile_{name}.service").run, arguments=request["flags"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve_requests(sys.argv[1])
