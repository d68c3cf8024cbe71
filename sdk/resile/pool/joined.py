"""A host that joins a pool from another machine: gets its credentials from the pool, and supervises its agent."""

import asyncio
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from resile_learner.datasets.host_datasets import MAX_BYTES
from resile_shared.bus.credentials import Credentials, write_credentials
from resile_shared.errors import ResileError, UsageError
from resile_shared.home import open_home
from resile_shared.http.api import Admission, Peer
from resile_shared.log_files import truncate_logs
from resile_shared.reachability import listening, obstacle
from resile_shared.storage.objects import PROBE, ObjectStorage, StorageError

from ..client import AsyncClient
from ..http_requests import Refused, Server
from .process import ServiceProcess
from .saving import drain_host
from .services import ServiceSpec, outward_address
from .supervisor import Log, keep_running, until_cancelled
from .worker_processes import has_workers

BUS_SECONDS = 5.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class JoinOptions:
    """The options of `resile host`."""

    server: Server
    name: str
    slots: int | None = None
    data_cache_bytes: int = MAX_BYTES
    """Disk space that fetched datasets may take."""
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None
    """Address of the workers here for those on other hosts; None: the one used to reach the pool."""
    folder: Path | None = None
    storage: str | None = None
    """URL of the pool's storage as seen from here; None: the URL that the pool uses."""
    grace_seconds: float = 120.0
    """How long jobs may take to leave when the host stops."""

    @property
    def pool_host(self) -> str:
        """The machine of the pool."""
        return urlsplit(self.server.url).hostname or ""

    @property
    def workers_at(self) -> str:
        """The address of the workers here for those on other hosts: workers listen on IPv4 only."""
        return self.address or (outward_address() if ":" in self.pool_host else outward_address(self.pool_host))

    def default_folder(self, home: Path) -> Path:
        """Return a folder for this host in this pool, not shared with hosts of other pools."""
        pool = re.sub(r"[^A-Za-z0-9.-]", "-", urlsplit(self.server.url).netloc)
        return home / "joined" / pool / self.name


class JoinedHost:
    """One host of a pool elsewhere. When its agent exits, it requests admission again and restarts it."""

    def __init__(self, options: JoinOptions, *, home: Path, log: Log) -> None:
        self.options = options
        self.folder = options.folder or options.default_folder(open_home(home))
        self._log = log
        self._agent: ServiceProcess | None = None
        self._lock: int | None = None

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Run until cancelled, then drain.

        Raises ResileError when the host cannot join, and at the end when a job did not leave it; VersionMismatch when
        its agent has to join again and the pool was upgraded.
        """
        try:
            left = await until_cancelled(self._serve(on_ready), self._drain)
        except Exception:
            await self.stop()
            raise
        await self.stop()
        if left:
            raise ResileError(left)

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        await self.start()
        on_ready()
        truncating = asyncio.ensure_future(truncate_logs(self.folder))
        try:
            await keep_running(self, self.options.name, self._log)
        finally:
            truncating.cancel()

    async def _drain(self) -> str:
        """Let the jobs leave, unless no agent runs here: another machine may be the host of this name by now."""
        if self._agent is None or not self._agent.is_running:
            return ""
        return await drain_host(
            self.options.server,
            self.options.name,
            seconds=self.options.grace_seconds,
            has_workers=lambda: self._agent is not None and has_workers(self._agent.process),
            log=self._log,
        )

    async def start(self) -> None:
        """Request admission from the pool, and start the agent. Raises ResileError."""
        admission = await self._ask()
        await check_peers(admission.peers, log=self._log)
        credentials = Credentials(
            url=bus_url(admission.bus_url, pool_host=self.options.pool_host),
            user=admission.bus_user,
            password=admission.bus_password,
        )
        await _check_bus(credentials.url)
        storage = self.options.storage or admission.storage
        await asyncio.to_thread(check_storage, storage, probe=admission.probe.encode())
        if self._lock is None:
            self._lock = lock_folder(self.folder)
        write_credentials(self._credentials, credentials)
        self._agent = ServiceProcess(self._spec(storage))
        await self._agent.start()

    async def wait(self) -> int:
        """Wait until the agent exits; return its exit status."""
        assert self._agent is not None, "it was started"
        return await self._agent.wait()

    async def stop(self) -> None:
        """Stop the agent; return when it has exited."""
        if self._agent is not None:
            await self._agent.stop()

    def pids(self) -> set[int]:
        """Return the id of the agent's process."""
        started = self._agent.process if self._agent else None
        return {started.pid} if started else set()

    async def kill(self) -> None:
        """Kill the agent."""
        if self._agent is not None:
            await self._agent.kill()

    @property
    def _credentials(self) -> Path:
        return self.folder / "credentials.json"

    async def _ask(self) -> Admission:
        server = self.options.server
        address, nonce = self.options.workers_at, secrets.token_hex(16)
        try:
            async with listening(address, nonce) as port, AsyncClient(server) as client:
                return await client.join(
                    self.options.name, incarnation=self._incarnation(), address=address, port=port, nonce=nonce
                )
        except Refused as error:
            if error.status != 401:
                raise
            raise UsageError(
                f"the pool at {server.url} rejects this token: use the one in the file `token` of its home"
            ) from error

    def _incarnation(self) -> int:
        try:
            return int((self.folder / "incarnation").read_text())
        except (OSError, ValueError):
            return 0

    def _spec(self, storage: str) -> ServiceSpec:
        options, folder = self.options, self.folder
        slots = ("--slots", str(options.slots)) if options.slots else ()
        labels = ",".join(f"{name}={value}" for name, value in options.labels.items())
        return ServiceSpec(
            name=options.name,
            module="resile_learner",
            arguments=(
                *("--credentials", str(self._credentials)),
                *("--health-port", "0", "--health-file", str(folder / "health")),
                *(
                    "--host",
                    options.name,
                    "--folder",
                    str(folder),
                    "--address",
                    options.workers_at,
                    "--storage",
                    storage,
                ),
                *("--labels", labels),
                *slots,
                *("--data-cache-bytes", str(options.data_cache_bytes)),
            ),
            log=folder / "agent.log",
            health=folder / "health",
        )


def lock_folder(folder: Path) -> int:
    """Make a host's folder if needed, and lock it until the descriptor is closed. Raises UsageError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "host.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"--folder: {folder} cannot be created: {error.strerror}: choose another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"--folder: another `resile host` uses {folder}: stop it, or choose another folder") from None
    return lock


def bus_url(url: str, *, pool_host: str) -> str:
    """Return the URL of the bus: a loopback address means the machine of the pool."""
    parts = urlsplit(url)
    if parts.hostname not in _LOOPBACK:
        return url
    host = f"[{pool_host}]" if ":" in pool_host else pool_host
    return f"{parts.scheme}://{host}:{parts.port}"


async def _check_bus(url: str) -> None:
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(BUS_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except OSError as error:  # TimeoutError is one
        why = error.strerror or "no answer"
        raise ResileError(
            f"the pool admits this host, but its bus at {url} cannot be reached from here ({why}): "
            f"open port {parts.port} to this machine"
        ) from error
    writer.close()


async def check_peers(peers: Sequence[Peer], *, log: Log) -> None:
    """Check that this machine reaches other hosts; log if it misses some, which may just have gone.

    Raises ResileError if it reaches none.
    """
    found = await asyncio.gather(*(obstacle(peer.address, peer.port, name=peer.host) for peer in peers))
    missing = [f"{peer.host} at {peer.address} ({why})" for peer, why in zip(peers, found, strict=True) if why]
    if not missing:
        return
    text = (
        f"this machine does not reach workers on {', '.join(missing)}: it must reach the other hosts on any port, and "
        "not only the pool; start a host that has no such address with --address"
    )
    if len(missing) == len(peers):
        raise ResileError(text)
    log(text)


def check_storage(url: str, *, probe: bytes) -> None:
    """Check that ``url`` holds the pool's ``probe``. Raises UsageError."""
    fault = f"--storage: {url} is not the pool's storage on this machine: "
    if url.startswith("file:") and not (Path(unquote(urlsplit(url).path)) / PROBE).exists():
        raise UsageError(
            f"{fault}mount the shared folder and pass it with --storage, "
            "or start the pool with a --storage that all machines reach (s3://, gs://, az://)"
        )
    try:
        found = ObjectStorage(url).read(PROBE)
    except StorageError as error:
        raise UsageError(f"--storage: {error}") from error
    if found != probe:
        raise UsageError(f"{fault}it belongs to another pool: pass the URL of the pool's storage as seen from here")
