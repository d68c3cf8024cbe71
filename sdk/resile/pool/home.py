"""The home folder of a pool, which one pool at a time may use.

`resile up` holds `lock`, which contains its process id. `token` is the secret of the API, and stays the same from one
`up` to the next. `pool.json` holds the URL and the token of the API while the pool is up.
"""

import fcntl
import os
import secrets
import socket
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from resile_shared.bus.credentials import write_private
from resile_shared.errors import ResileError, UsageError
from resile_shared.home import open_home, writing

_FOLDERS = ("bus", "storage", "hosts", "logs", "health")


class RunningPool(BaseModel):
    """The content of `pool.json`."""

    model_config = ConfigDict(frozen=True)

    url: str
    token: str
    pid: int
    chaos: bool = False
    """Whether the pool may be attacked with `resile chaos`."""


class PoolHome:
    """The home of the pool that this process runs. Locked until `close`, or the process ends."""

    def __init__(self, path: Path) -> None:
        """Open and lock the home, creating it if needed. Raises UsageError if it cannot be used, or is in use."""
        self.path = open_home(path)
        with writing(self.path):
            self._lock = self._take_lock()
            for name in _FOLDERS:
                (self.path / name).mkdir(mode=0o700, exist_ok=True)
            token = self.token_file
            if not token.exists():
                write_private(token, secrets.token_urlsafe(24).encode())
            self.token = token.read_text(errors="replace").strip()

    @property
    def bus(self) -> Path:
        """Folder of nats-server."""
        return self.path / "bus"

    def storage(self, asked: str | None) -> str:
        """Return the URL of the pool's object storage. Raises UsageError if it is not the one used before."""
        file = self.path / "storage-url"
        used = file.read_text(errors="replace") if file.exists() else None
        if used and asked and asked != used:
            raise UsageError(
                f"the pool in {self.path} stores its packages and checkpoints in {used}: omit --storage, "
                "or choose another --home"
            )
        return asked or used or (self.path / "storage").as_uri()

    @property
    def token_file(self) -> Path:
        """File that holds the token and nothing else."""
        return self.path / "token"

    def host(self, name: str) -> Path:
        """Return the folder of one host's agent."""
        return self.path / "hosts" / name

    def log(self, service: str) -> Path:
        """Return the log of one service."""
        return self.path / "logs" / f"{service}.log"

    def health(self, service: str) -> Path:
        """Return the file to which a service writes its health URL."""
        return self.path / "health" / service

    @property
    def api_file(self) -> Path:
        """File to which the monitor writes the URL of the API."""
        return self.path / "health" / "api"

    def last_free_port(self, host: str) -> int:
        """Return the last port of the API, 0 if it is unknown or in use."""
        try:
            port = urlsplit(self.api_file.read_text()).port or 0
        except (OSError, ValueError):
            return 0
        return 0 if listening_fault(host, port) else port

    def announce(self, url: str, *, storage: str, chaos: bool = False) -> None:
        """Write `pool.json` for clients on this machine, and the storage URL for the next `up`."""
        write_private(self.path / "storage-url", storage.encode())
        pool = RunningPool(url=url, token=self.token, pid=os.getpid(), chaos=chaos)
        write_private(self.path / "pool.json", pool.model_dump_json().encode())

    def close(self) -> None:
        """Delete `pool.json`, and release the lock."""
        (self.path / "pool.json").unlink(missing_ok=True)
        os.close(self._lock)

    def _take_lock(self) -> int:
        file = self.path / "lock"
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(self._refusal(file.read_text())) from None
        os.truncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        return lock

    def _refusal(self, pid: str) -> str:
        pool = read_pool(self.path)
        where = f" at {pool.url}" if pool and str(pool.pid) == pid else ""
        return f"a pool is already running in {self.path}{where} (process {pid}): stop it, or choose another --home"


def listening_fault(host: str, port: int) -> OSError | None:
    """Return the error that a server would get when it listens there, None for none."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        return error


def check_loopback() -> None:
    """Raise UsageError unless services and workers can listen on the IPv4 address of this machine for itself."""
    if fault := listening_fault("127.0.0.1", 0):
        raise UsageError(
            f"services and workers listen on 127.0.0.1, which this machine does not have: {fault.strerror}: "
            "add it, for example with `ip addr add 127.0.0.1/8 dev lo`"
        )


def read_pool(home: Path) -> RunningPool | None:
    """Return `pool.json` of ``home``, None without one. After a kill the file may be stale."""
    file = home.expanduser() / "pool.json"
    try:
        return RunningPool.model_validate_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ResileError(f"cannot read {file}: {error.strerror}: only the owner of the pool may read it") from error
    except ValidationError as error:
        raise ResileError(f"{file} is invalid: restart the pool with `resile up`") from error
