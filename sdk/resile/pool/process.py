"""One service as a process: start, readiness probe, stop, kill."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

import aiohttp
import orjson

from resile_shared.errors import ResileError
from resile_shared.processes import dying_with_parent
from resile_shared.version import check_installed

from .disk import write_fault
from .services import ServiceSpec

STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_NO_THREAD = "can't start new thread"
_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=5.0)


class ServiceFailed(ResileError):
    """A service exited before it was ready."""

    def __init__(self, spec: ServiceSpec, status: int) -> None:
        last = last_line(spec.log) or write_fault(spec.log.parent)
        if _NO_THREAD in last or (status == -signal.SIGABRT and not last):  # libuv aborts without a word
            last = "no thread could be started: raise the limit of processes of this user (ulimit -u)"
        cause = f": {last}" if last else ""
        super().__init__(f"{spec.name} {describe_exit(status)} before it was ready{cause} (its log: {spec.log})")


class ServiceProcess:
    """A service that can be restarted. It dies with the thread that starts it, and so with this process."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        """The name used in messages."""
        return self.spec.name

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not exited."""
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Return when it is ready. Raises ServiceFailed if it exits before that, and OtherVersionInstalled."""
        check_installed()
        self.spec.health.unlink(missing_ok=True)
        self._scrape_target.unlink(missing_ok=True)
        with self.spec.log.open("ab") as log:
            self.process = process = await asyncio.create_subprocess_exec(
                *(*self.spec.prefix, sys.executable, "-P", "-m", self.spec.module, *self.spec.arguments),
                "--supervised=true",
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
                preexec_fn=dying_with_parent(),
            )
        async with aiohttp.ClientSession(timeout=_PROBE_TIMEOUT) as http:
            while not await self._is_ready(http):
                if process.returncode is not None:
                    raise ServiceFailed(self.spec, process.returncode)
                await asyncio.sleep(_POLL_SECONDS)
        self._announce_metrics()

    async def wait(self) -> int:
        """Wait until it exits; return its exit status."""
        assert self.process is not None, "it was started"
        return await self.process.wait()

    async def stop(self) -> None:
        """Ask it to exit, and kill it if it takes too long; return when it is gone."""
        process = self.process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None, "it is a pipe"
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Kill it and its process group; return when it has exited."""
        self.send_kill()
        if self.process is not None:
            await self.process.wait()

    def send_kill(self) -> None:
        """Send SIGKILL to its process group without waiting."""
        if self.process is not None and self.is_running:
            with contextlib.suppress(ProcessLookupError):  # it may have exited before the event loop is notified
                os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def _scrape_target(self) -> Path:
        return self.spec.health.with_name(f"{self.spec.health.name}.json")

    def _announce_metrics(self) -> None:
        """Tell Prometheus where the metrics are, by its file-based service discovery."""
        address = self.spec.health.read_text().removeprefix("http://")
        target = {
            "targets": [address],
            "labels": {"service": self.spec.module.removeprefix("resile_"), "part": self.name},
        }
        draft = self.spec.health.with_name(f"{self.spec.health.name}.draft")
        draft.write_bytes(orjson.dumps([target]))
        draft.replace(self._scrape_target)

    async def _is_ready(self, http: aiohttp.ClientSession) -> bool:
        if not self.spec.health.exists():
            return False
        try:
            async with http.get(f"{self.spec.health.read_text()}/readyz") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def describe_exit(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"exited status={status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"exited signal={names.get(-status, -status)}"


def last_line(log: Path) -> str:
    """Return the last line of a log, empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return lines[-1] if lines else ""


def _environment() -> dict[str, str]:
    """The environment of a service: without RESILE_ variables, since its settings are flags."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RESILE_")}
