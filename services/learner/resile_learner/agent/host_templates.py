"""The templates of a host: starts and ends them, and lets workers wait for the decision about theirs."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson

from ..messages import WorkerConfig
from ..processes.client import ForkServerClient
from ..processes.fork_servers import ForkServers
from ..processes.protocol import TemplateContent, TemplateExited, TemplateLoaded
from .events import EndTemplate, Event, ForkWorker, PrepareTemplate, TemplateEnded, TemplateReady, WorkerPrepared

logger = logging.getLogger(__name__)

Key = tuple[str, int]


@dataclass(frozen=True)
class Imports:
    """The values that determine which modules the workers of a job import."""

    code: str
    """Names the package."""
    script: str
    directory: str
    environment: str
    variables: Mapping[str, str]
    """The variables that all its workers have, on any slot and in any job with the same code."""

    def key(self, script: str) -> str:
        """Name it; ``script`` is relative to the package, which each job has in a folder of its own."""
        parts = [self.code, script, self.environment, sorted(self.variables.items())]
        return hashlib.sha256(orjson.dumps(parts)).hexdigest()


class HostTemplates:
    """The templates of one incarnation of a host; reports their outcomes to the core as events."""

    def __init__(self, fork_servers: ForkServers, post: Callable[[Event], None]) -> None:
        self._fork_servers = fork_servers
        self._post = post
        self._imports: dict[str, Imports] = {}
        self._servers: dict[int, ForkServerClient] = {}
        self._waiting: dict[Key, asyncio.Future[int | None]] = {}

    async def choose(self, config: WorkerConfig, imports: Imports, *, script: str) -> WorkerConfig:
        """Return the configuration of a worker with the template that the core has chosen for it."""
        key = config.job, config.worker
        self._imports[config.job] = imports
        chosen = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._post(WorkerPrepared(*key, imports.key(script)))
        try:
            return config.model_copy(update={"template": await chosen})
        finally:
            del self._waiting[key]

    async def carry_out(self, command: ForkWorker | PrepareTemplate | EndTemplate) -> None:
        """Carry out a command of the core. To prepare a template may take as long as to start a fork server."""
        match command:
            case ForkWorker(job, worker, template):
                waiting = self._waiting.get((job, worker))
                if waiting is not None and not waiting.done():
                    waiting.set_result(template)
            case PrepareTemplate():
                await self._prepare(command)
            case EndTemplate(number):
                if server := self._servers.pop(number, None):
                    await server.end_template(number)

    def forget(self, job: str) -> None:
        """Forget a job that does not concern this host any more."""
        self._imports.pop(job, None)

    async def _prepare(self, command: PrepareTemplate) -> None:
        imports = self._imports.get(command.job)
        if imports is None:
            self._post(TemplateEnded(command.number, "its job has left this host"))
            return
        content = TemplateContent(
            modules=command.modules,
            script=imports.script,
            directory=imports.directory,
            env=dict(imports.variables),
            is_urgent=command.is_urgent,
        )
        try:
            server = await self._fork_servers.get(imports.environment)
            self._servers[command.number] = server
            await server.prepare_template(command.number, content, self._on_template)
        except OSError as error:
            self._servers.pop(command.number, None)
            self._post(TemplateEnded(command.number, f"it cannot be started: {error}"))

    def _on_template(self, report: TemplateLoaded | TemplateExited) -> None:
        match report:
            case TemplateLoaded(template=number, num_modules=num_modules, num_bytes=num_bytes):
                logger.info("template ready number=%s modules=%s bytes=%s", number, num_modules, num_bytes)
                self._post(TemplateReady(number, num_modules, num_bytes))
            case TemplateExited(template=number, reason=reason, is_refused=is_refused):
                logger.info("template ended number=%s: %s", number, reason)
                self._servers.pop(number, None)
                self._post(TemplateEnded(number, reason, is_refused))
