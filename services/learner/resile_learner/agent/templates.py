"""Which templates a host has, and which of its workers are forked from one; pure.

A template (`processes/template.py`) serves all workers with the same key: code, environment and variables. The rules:

- The first worker of a key waits for a template that has run the imports at the head of its script, and so do workers
  that follow meanwhile: the host imports the modules once, not once for each. They wait `URGENT_SECONDS` at most.
- Once a worker has reported which other modules it imported before its training call, a second template with all of
  them is prepared while the job trains, and replaces the first. That happens once for a key, or twice if a later worker
  reports more.
- A key whose template was refused, or has ended `MAX_ENDS` times, gets no further template. A template with nothing to
  import is useless and is ended. In these cases workers are forked from the fork server, with the reason.
- A template is kept after its jobs have ended, for the next job with the same key: at most `KEEP` templates, and
  `MAX_BYTES` in total. The least recently used is ended first, and one that nobody has used for `IDLE_SECONDS`.
- The templates that the previous incarnation had are prepared again before the host joins the pool: slots that join
  while every worker has to wait for its imports would be idle. The host waits for them `RESTORE_SECONDS` at most.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from .events import (
    Command,
    EndTemplate,
    ForkWorker,
    PrepareTemplate,
    TemplateEnded,
    TemplateKept,
    TemplateReady,
    WorkerPrepared,
)

KEEP = 4
MAX_BYTES = 2 << 30
URGENT_SECONDS = 30.0
RESTORE_SECONDS = 10.0
BACKGROUND_SECONDS = 600.0
IDLE_SECONDS = 900.0
RETIRE_SECONDS = 10.0
"""Seconds for which a template is kept after another one has replaced it: workers are still being forked from it."""
MAX_ENDS = 3
MAX_LISTS = 2
"""At most this many templates are prepared for the modules that workers of one key report."""
MAX_KEYS = 200
"""At most this many keys are remembered."""


@dataclass
class _Template:
    key: str
    begun: float
    used: float
    is_urgent: bool
    modules: tuple[str, ...]
    is_kept: bool = False
    """Whether the previous incarnation had this template."""
    is_ready: bool = False
    replaced: float | None = None
    """When another template replaced this one; None: none has."""
    num_bytes: int = 0
    waiting: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class _Key:
    modules: tuple[str, ...] = ()
    """Modules that workers have reported, beyond those of the script's head."""
    num_lists: int = 0
    num_ends: int = 0
    refusal: str = ""


class Templates:
    """The templates of one incarnation."""

    def __init__(self) -> None:
        self._templates: dict[int, _Template] = {}
        self._keys: OrderedDict[str, _Key] = OrderedDict()  # the least recently used comes first
        self._jobs: dict[str, str] = {}
        """The key of each job that has had a worker here."""
        self._num = 0

    def is_restoring(self, now: float) -> bool:
        """Whether to wait until templates of the previous incarnation are ready."""
        kept = [template for template in self._templates.values() if template.is_kept]
        return any(not template.is_ready and now - template.begun < RESTORE_SECONDS for template in kept)

    def handle(self, event: WorkerPrepared | TemplateKept | TemplateReady | TemplateEnded, now: float) -> list[Command]:
        """Handle an event at ``now`` (seconds); return the commands to carry out, in order."""
        match event:
            case WorkerPrepared():
                return self._on_prepared(event, now)
            case TemplateKept():
                return self._on_kept(event, now)
            case TemplateReady():
                return self._on_ready(event, now)
            case TemplateEnded():
                return self._on_ended(event)

    def _on_prepared(self, event: WorkerPrepared, now: float) -> list[Command]:
        """Fork a worker whose configuration is complete, or have it wait for a template."""
        job, key = event.job, event.key
        self._jobs[job] = key
        known = self._key(key)
        number, template = self._of(key)
        if template and number and (template.is_ready or template.is_urgent):
            template.used = now
            if template.is_ready:
                return [ForkWorker(job, event.worker, number)]
            template.waiting.append((job, event.worker))
            return []
        if known.refusal:
            return [ForkWorker(job, event.worker, None, known.refusal)]
        prepare = self._prepare(job, key, known.modules, now, is_urgent=True)
        self._templates[self._num].waiting.append((job, event.worker))
        return [prepare, *self._evict()]

    def _on_kept(self, event: TemplateKept, now: float) -> list[Command]:
        """Prepare a template of the previous incarnation."""
        known = self._key(event.key)
        known.modules, known.num_lists = event.modules, 1 if event.modules else 0
        prepare = self._prepare(event.name, event.key, event.modules, now, is_urgent=True)
        self._templates[self._num].is_kept = True
        return [prepare]

    def on_imported(self, job: str, modules: Iterable[str], now: float) -> list[Command]:
        """Prepare a template with the modules that a worker had to import itself, while the job trains."""
        key = self._jobs.get(job, "")
        known = self._key(key)
        new = [name for name in modules if name not in set(known.modules)]
        is_busy = any(not template.is_ready for template in self._templates.values())
        if not key or not new or known.num_lists >= MAX_LISTS or known.num_ends >= MAX_ENDS or is_busy:
            return []
        if known.refusal and known.refusal != NOTHING:
            return []
        known.modules = (*known.modules, *new)
        known.num_lists += 1
        return [self._prepare(job, key, known.modules, now, is_urgent=False)]

    def _on_ready(self, event: TemplateReady, now: float) -> list[Command]:
        """Fork the workers that wait for the template; it replaces the previous one."""
        template = self._templates.get(event.number)
        if template is None:
            return [EndTemplate(event.number)]
        if not event.num_modules:
            self._key(template.key).refusal = NOTHING
            return self._end(event.number, NOTHING)
        self._key(template.key).refusal = ""
        template.is_ready, template.used, template.num_bytes = True, now, event.num_bytes
        for number, other in self._templates.items():
            if other.key == template.key and number != event.number:
                other.replaced = now
        workers, template.waiting = template.waiting, []
        return [*(ForkWorker(*worker, event.number) for worker in workers), *self._evict()]

    def _on_ended(self, event: TemplateEnded) -> list[Command]:
        """Fork the workers that wait for the template without one; remember a refusal."""
        template = self._templates.pop(event.number, None)
        if template is None:
            return []
        known = self._key(template.key)
        known.num_ends += 1
        if template.modules:  # the template of the script's head may still work
            known.num_lists, known.modules = MAX_LISTS, ()
        elif event.is_refused or known.num_ends >= MAX_ENDS:
            known.refusal = event.reason
        return [ForkWorker(*worker, None, event.reason) for worker in template.waiting]

    def on_exit(self, job: str, worker: int) -> None:
        """Forget a worker that has ended, possibly before it was forked."""
        for template in self._templates.values():
            if (job, worker) in template.waiting:
                template.waiting.remove((job, worker))

    def on_tick(self, jobs: Iterable[str], now: float) -> list[Command]:
        """End templates that take too long or that nobody uses; ``jobs`` are those that concern this host."""
        living = set(jobs)
        self._jobs = {job: key for job, key in self._jobs.items() if job in living}
        in_use = set(self._jobs.values())
        commands: list[Command] = []
        for number, template in list(self._templates.items()):
            limit = URGENT_SECONDS if template.is_urgent else BACKGROUND_SECONDS
            if template.replaced is not None and now - template.replaced > RETIRE_SECONDS:
                commands += self._end(number, "")
            elif template.is_ready:
                if template.key not in in_use and now - template.used > IDLE_SECONDS:
                    commands += self._end(number, "")
            elif now - template.begun > limit:
                reason = f"the template was not ready after {limit:g} seconds"
                commands += [EndTemplate(number), *self._on_ended(TemplateEnded(number, reason, is_refused=True))]
        return commands

    def _prepare(self, job: str, key: str, modules: tuple[str, ...], now: float, *, is_urgent: bool) -> Command:
        self._num += 1
        self._templates[self._num] = _Template(key, now, now, is_urgent, modules)
        return PrepareTemplate(self._num, job, modules, is_urgent)

    def _of(self, key: str) -> tuple[int | None, _Template | None]:
        """The template of a key: the one that is ready, or else one that is being prepared."""
        found = [
            (number, template)
            for number, template in self._templates.items()
            if template.key == key and template.replaced is None
        ]
        return max(found, key=lambda each: (each[1].is_ready, each[1].is_urgent), default=(None, None))

    def _end(self, number: int, reason: str) -> list[Command]:
        template = self._templates.pop(number)
        return [EndTemplate(number), *(ForkWorker(*worker, None, reason) for worker in template.waiting)]

    def _evict(self) -> list[Command]:
        """End the least recently used templates beyond what is kept."""
        commands: list[Command] = []
        idle = sorted((each.used, number) for number, each in self._templates.items() if each.is_ready)
        for _, number in idle[:-1]:
            num_bytes = sum(template.num_bytes for template in self._templates.values())
            if len(self._templates) <= KEEP and num_bytes <= MAX_BYTES:
                break
            commands += self._end(number, "")
        return commands

    def _key(self, key: str) -> _Key:
        known = self._keys.setdefault(key, _Key())
        self._keys.move_to_end(key)
        while len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
        return known


NOTHING = "its script imports nothing at its head that the fork server has not imported"
