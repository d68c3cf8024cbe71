"""The templates of a host: starts and ends them, and lets workers wait for the decision about theirs."""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import pydantic

from resile_shared.bus.credentials import write_private
from resile_shared.errors import ResileError
from resile_shared.folders import remove_tree

from ..messages import CodeCopy, Message, WorkerConfig
from ..processes.client import ForkServerClient
from ..processes.fork_protocol import TemplateContent, TemplateExited, TemplateLoaded
from ..processes.fork_servers import ForkServers, ForkServersClosed
from .events import (
    EndTemplate,
    Event,
    ForkWorker,
    PrepareTemplate,
    TemplateEnded,
    TemplateKept,
    TemplateReady,
    WorkerPrepared,
)
from .folder import AgentFolder
from .packages import Packages, find_script
from .templates import KEEP

logger = logging.getLogger(__name__)

Key = tuple[str, int]
UNPACK_SECONDS = 5.0
logger = logging.getLogger(__name__)


class KeptTemplate(Message):
    """What is needed to prepare a template again."""

    key: str
    code: str
    """Key of the package."""
    script: str
    """Path of the script relative to the package."""
    environment: str
    variables: dict[str, str]
    modules: tuple[str, ...]


class _Kept(Message):
    templates: tuple[KeptTemplate, ...] = ()


class KeptTemplates:
    """The templates in ``file``, in the order in which they became ready; at most one of each key.

    The next incarnation of the agent prepares them before it joins.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> Sequence[KeptTemplate]:
        """Return the templates, the last one first; none if the file does not exist or cannot be used."""
        try:
            kept = _Kept.model_validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, pydantic.ValidationError) as error:
            logger.warning("%s is not used: %s", self._file, " ".join(str(error).split()))
            return ()
        return kept.templates[::-1]

    def add(self, template: KeptTemplate) -> None:
        """Keep a template, in place of another one of its key, and of the oldest one if there are too many."""
        others = [other for other in self.read()[::-1] if other.key != template.key]
        self._write([*others, template][-KEEP:])

    def remove(self, template: KeptTemplate) -> None:
        """Remove a template, unless another one of its key has replaced it."""
        kept = self.read()[::-1]
        if template in kept:
            self._write([other for other in kept if other != template])

    def _write(self, templates: Sequence[KeptTemplate]) -> None:
        """Replace the file. Variables may be secret."""
        try:
            write_private(self._file, _Kept(templates=tuple(templates)).model_dump_json().encode())
        except ResileError as error:
            logger.warning("templates are not kept for the next start: %s", error)


@dataclass(frozen=True)
class Imports:
    """The values that determine which modules the workers of a job import."""

    code: str
    """Key of the package."""
    script: str
    name: str
    """Path of the script relative to the package, which each job has in a folder of its own."""
    directory: str
    environment: str
    variables: Mapping[str, str]
    """The variables that all workers have, on any slot and in any job with the same code."""
    copy: CodeCopy | None = None
    """What workers run of the script's project; None: what is there."""

    @property
    def key(self) -> str:
        """Key of the templates from which workers with these imports may be forked."""
        parts = [self.code, self.name, self.environment, sorted(self.variables.items())]
        return hashlib.sha256(orjson.dumps(parts)).hexdigest()


class HostTemplates:
    """The templates of one incarnation of a host; reports their outcomes to the core as events."""

    def __init__(
        self, fork_servers: ForkServers, post: Callable[[Event], None], kept: KeptTemplates | None = None
    ) -> None:
        self._fork_servers = fork_servers
        self._post = post
        self._kept = kept
        self._contents: dict[int, KeptTemplate] = {}
        self._imports: dict[str, Imports] = {}
        self._servers: dict[int, ForkServerClient] = {}
        self._waiting: dict[Key, asyncio.Future[int | None]] = {}

    async def restore(self, packages: Packages, folder: AgentFolder) -> None:
        """Report the templates that the previous incarnation had, as far as their packages are still here."""
        if self._kept is None:
            return
        for kept in self._kept.read():
            name = f".template-{kept.key}"  # no job's folder
            directory = folder.code(name)
            await asyncio.to_thread(remove_tree, directory)
            try:
                async with asyncio.timeout(UNPACK_SECONDS):
                    await packages.unpack_kept(kept.code, directory)
                script = find_script(directory, kept.script)
            except (ResileError, OSError) as error:  # TimeoutError is one
                logger.info(
                    "template not prepared again: %s", str(error) or "its package could not be unpacked in time"
                )
                self._kept.remove(kept)
                continue
            self._imports[name] = Imports(
                kept.code, str(script), kept.script, str(directory), kept.environment, kept.variables
            )
            self._post(TemplateKept(name, self._imports[name].key, kept.modules))

    async def choose(self, config: WorkerConfig, imports: Imports) -> WorkerConfig:
        """Return the configuration of a worker with the template that the core has chosen for it."""
        key = config.job, config.worker
        self._imports[config.job] = imports
        chosen = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._post(WorkerPrepared(*key, imports.key))
        try:
            return config.model_copy(update={"template": await chosen})
        finally:
            del self._waiting[key]

    async def carry_out(self, command: ForkWorker | PrepareTemplate | EndTemplate) -> None:
        """Carry out a command of the core. Preparing a template may take as long as starting a fork server."""
        match command:
            case ForkWorker(job, worker, template):
                waiting = self._waiting.get((job, worker))
                if waiting is not None and not waiting.done():
                    waiting.set_result(template)
            case PrepareTemplate():
                await self._prepare(command)
            case EndTemplate(number):
                self._drop(number)
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
            code=imports.copy,
            directory=imports.directory,
            env=dict(imports.variables),
            is_urgent=command.is_urgent,
        )
        self._contents[command.number] = KeptTemplate(
            key=imports.key,
            code=imports.code,
            script=imports.name,
            environment=imports.environment,
            variables=dict(imports.variables),
            modules=command.modules,
        )
        try:
            server = await self._fork_servers.get(imports.environment)
            self._servers[command.number] = server
            await server.prepare_template(command.number, content, self._on_template)
        except ForkServersClosed as error:  # kept: the next incarnation tries again
            self._post(TemplateEnded(command.number, str(error)))
        except OSError as error:
            self._servers.pop(command.number, None)
            self._drop(command.number)
            self._post(TemplateEnded(command.number, f"it cannot be started: {error}"))

    def _on_template(self, report: TemplateLoaded | TemplateExited) -> None:
        match report:
            case TemplateLoaded(template=number, num_modules=num_modules, num_bytes=num_bytes):
                logger.info("template ready number=%s modules=%s bytes=%s", number, num_modules, num_bytes)
                self._post(TemplateReady(number, num_modules, num_bytes))
                if self._kept and (content := self._contents.get(number)):
                    self._kept.add(content)
            case TemplateExited(template=number, reason=reason, is_refused=is_refused):
                logger.info("template ended number=%s: %s", number, reason)
                self._servers.pop(number, None)
                if is_refused:  # else the next incarnation tries again
                    self._drop(number)
                self._post(TemplateEnded(number, reason, is_refused))

    def _drop(self, number: int) -> None:
        """Do not keep a template for the next incarnation."""
        content = self._contents.pop(number, None)
        if self._kept and content:
            self._kept.remove(content)
