"""What a local run trains."""

from dataclasses import dataclass
from pathlib import Path

from resile_learner.messages import CodeCopy
from resile_scheduler.policies.plan import PlanPolicy
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.jobs import MAX_WORKERS, JobRecord, JobSpec, JobState
from resile_shared.messages.reports import BatchStep

from .code import arguments, open_code
from .runs import RunFolder
from .settings import RunSettings


@dataclass(frozen=True)
class LocalJob:
    """The only job of a local run: what its settings say, and for the rest what the run that is resumed had."""

    id: str
    name: str
    script: str
    args: tuple[str, ...]
    code: CodeCopy
    """What its workers run of the script's project."""
    storage: str
    """URL of the object storage."""
    requirements: tuple[str, ...]
    data: tuple[Dataset, ...]
    batches: tuple[BatchStep, ...]

    @classmethod
    def of(cls, settings: RunSettings, folder: RunFolder) -> "LocalJob":
        """Return the job of the run in ``folder``, whose code is copied there. Raises UsageError, or ResileError."""
        journal = folder.journal
        script = settings.script.absolute()
        storage = journal.storage or folder.path.as_uri()
        return cls(
            id=folder.job,
            name=settings.name or journal.name or script.stem,
            script=str(script),
            args=arguments(settings, journal),
            code=open_code(settings, folder),
            storage=f"{settings.storage.rstrip('/')}/{folder.job}" if settings.storage else storage,
            requirements=settings.requirements or (journal.record.spec.requirements if journal.record else ()),
            data=settings.data or (journal.record.spec.data if journal.record else ()),
            batches=settings.batches or journal.batches,
        )

    def spec(self, policy: PlanPolicy) -> JobSpec:
        """Return the job as the scheduler knows it, with the numbers of workers of ``policy``."""
        sizes = [step.workers for step in policy.steps]
        return JobSpec(
            name=self.name[:200],
            package=str(Path.cwd()),
            script=self.script,
            args=self.args,
            requirements=self.requirements,
            data=self.data,
            min_workers=1 if policy.fits_shards else min(sizes),
            max_workers=MAX_WORKERS if policy.fits_shards else max(sizes),
        )

    def paused(self, stored: JobRecord, policy: PlanPolicy) -> JobRecord:
        """Return the record of the run that is resumed, as of a job that is paused."""
        return JobRecord(
            job=self.id,
            spec=self.spec(policy),
            state=JobState.PAUSED,
            priority=stored.priority,
            submitted=stored.submitted,
            generation=stored.generation,
            lineage=max(1, stored.lineage),  # a run that is resumed always looks for a checkpoint
            next_worker=stored.next_worker,
            num_items=stored.num_items,
            kind=stored.kind,
            reason=stored.reason,
            iteration=stored.iteration,
            allocation=stored.allocation,
            warnings=stored.warnings,
            checkpoint=stored.checkpoint,
        )
