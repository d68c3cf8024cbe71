"""The calls of `client.AsyncClient` without asyncio.

Written by `python -m tests.sdk.sync_calls`: do not edit it.
"""

from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from resile_shared.http import api
from resile_shared.http.slot_history import SlotsView
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.jobs import JobSpec
from resile_shared.policies import PolicyName

from .client import AsyncClient
from .job_options import PackedJob

T = TypeVar("T")


class SyncCalls:
    """Each method waits for the method of ``_client`` with the same name."""

    _client: AsyncClient

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def _iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        raise NotImplementedError

    def jobs(self) -> tuple[api.JobSummary, ...]:
        """Return all jobs, in the order of their submission."""
        return self._run(self._client.jobs())

    def job(self, job: str) -> api.JobView:
        """Return one job with the newest 1000 items of its history."""
        return self._run(self._client.job(job))

    def whole_job(self, job: str) -> api.JobView:
        """Return one job with its whole history."""
        return self._run(self._client.whole_job(job))

    def spec(self, job: str) -> JobSpec:
        """Return the submitted spec, which `submit` accepts again."""
        return self._run(self._client.spec(job))

    def find(self, name: str, *, newest: bool = False) -> str:
        """Return the id of the job that has the id ``name``, or is the only one of that name.

        Of several, ``NAME@latest`` is the one that was submitted last, and so is ``NAME`` if ``newest``.
        """
        return self._run(self._client.find(name, newest=newest))

    def find_model(self, name: str) -> str:
        """Return the id of the job ``name``; of several of this name, the one with the newest model, if one has any."""
        return self._run(self._client.find_model(name))

    def upload(self, content: bytes) -> str:
        """Upload packed code (`resile.package.pack`); return its key for `JobSpec.package`."""
        return self._run(self._client.upload(content))

    def submit(self, spec: JobSpec) -> str:
        """Submit a job; return its id once it is stored."""
        return self._run(self._client.submit(spec))

    def submission(self, spec: JobSpec) -> api.Submission:
        """Submit a job; return its id once it is stored, and a warning if no host that is up can run it."""
        return self._run(self._client.submission(spec))

    def submit_packed(self, job: PackedJob) -> api.Submission:
        """Upload and submit a job that `pack_job` packed; return its id, and a warning as `submission` does."""
        return self._run(self._client.submit_packed(job))

    def call(self, service: str, method: str, body: bytes, *, seconds: float) -> bytes:
        """Call a method of a service with arguments in JSON; return its result in JSON.

        Raises Refused with a ``code``: failed, invalid, unknown, busy, late or lost (docs/serving.md).
        """
        return self._run(self._client.call(service, method, body, seconds=seconds))

    def set_priority(self, job: str, priority: int) -> None:
        """Change the priority of a job."""
        self._run(self._client.set_priority(job, priority))

    def stop(self, job: str, *, reason: str = "") -> None:
        """Stop a job for good."""
        self._run(self._client.stop(job, reason=reason))

    def pause(self, job: str) -> None:
        """Pause a job: it saves a checkpoint and releases its slots."""
        self._run(self._client.pause(job))

    def resume(self, job: str) -> None:
        """Resume a paused job."""
        self._run(self._client.resume(job))

    def suspend_all(self) -> tuple[str, ...]:
        """Suspend all jobs, since the pool is about to stop; return those that still hold slots.

        Each saves a checkpoint and goes back to the queue. None starts until the scheduler is started again.
        """
        return self._run(self._client.suspend_all())

    def policy(self) -> api.PolicyView:
        """Return how jobs share the slots of the pool."""
        return self._run(self._client.policy())

    def change_policy(self, policy: PolicyName | None = None, *, preemption: bool | None = None) -> api.PolicyView:
        """Change how jobs share the slots of the pool, and return it; None leaves it as it is."""
        return self._run(self._client.change_policy(policy, preemption=preemption))

    def tenants(self) -> tuple[api.TenantView, ...]:
        """Return the tenants that are configured, and those that have jobs."""
        return self._run(self._client.tenants())

    def set_tenant(
        self, tenant: str, *, weight: int | None = None, quota: int | None = None, cap: int | None = None
    ) -> tuple[api.TenantView, ...]:
        """Change what a tenant gets of the slots, and return all tenants; None leaves it as it is, 0 is no cap."""
        return self._run(self._client.set_tenant(tenant, weight=weight, quota=quota, cap=cap))

    def delete_tenant(self, tenant: str) -> tuple[api.TenantView, ...]:
        """Reset a tenant to the default weight and quota; return all tenants."""
        return self._run(self._client.delete_tenant(tenant))

    def usage(self, *, tenant: str | None = None, hours: int | None = None) -> api.UsageView:
        """Return what was used in the last ``hours``, or ever, by one tenant or by all."""
        return self._run(self._client.usage(tenant=tenant, hours=hours))

    def changes(self, job: str) -> tuple[api.ChangeView, ...]:
        """Return what changed in a job, oldest first."""
        return self._run(self._client.changes(job))

    def trace(self, trace: str) -> api.TraceView:
        """Return the steps of a change. Raises Refused if they are not kept."""
        return self._run(self._client.trace(trace))

    def add_attack(self, trace: str, attack: api.NewAttack) -> None:
        """Add an attack to the steps of the change that it caused. Raises Refused if they are not kept."""
        self._run(self._client.add_attack(trace, attack))

    def delete(self, job: str) -> None:
        """Remove a job that has ended, with all that is stored of it: history, logs, checkpoints, model, output."""
        self._run(self._client.delete(job))

    def curves(self, job: str) -> api.CurvesView:
        """Return loss, metrics, scores and speed of a job by iteration, thinned."""
        return self._run(self._client.curves(job))

    def slots(self, *, seconds: int = 86400) -> SlotsView:
        """Return how many slots each job held in the last ``seconds`` before the newest event, thinned."""
        return self._run(self._client.slots(seconds=seconds))

    def ledger(self, job: str) -> api.LedgerView:
        """Return how often the samples of each epoch were used."""
        return self._run(self._client.ledger(job))

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the data that is registered for jobs, in the order of the names."""
        return self._run(self._client.datasets())

    def dataset(self, name: str) -> Dataset:
        """Return a dataset as it was registered, for `JobSpec.data`."""
        return self._run(self._client.dataset(name))

    def add_dataset(self, name: str, uri: str) -> Dataset:
        """Register what is at ``uri`` now under a name, in place of what was registered under it."""
        return self._run(self._client.add_dataset(name, uri))

    def remove_dataset(self, name: str) -> None:
        """Remove a dataset; its files stay."""
        self._run(self._client.remove_dataset(name))

    def save_code(self, job: str, file: Path) -> None:
        """Write the code that was submitted to ``file``, as a tar.gz."""
        self._run(self._client.save_code(job, file))

    def save_model(self, job: str, file: Path) -> None:
        """Write the final model to ``file``, whole or not at all: for torch.load if named .pt, else safetensors."""
        self._run(self._client.save_model(job, file))

    def save_output(self, job: str, file: Path) -> None:
        """Write the files of the workers' output folder to ``file``, a tar."""
        self._run(self._client.save_output(job, file))

    def logs(self, job: str, *, tail: int) -> tuple[api.LogEntry, ...]:
        """Return the newest ``tail`` lines that the job's workers printed."""
        return self._run(self._client.logs(job, tail=tail))

    def follow_logs(self, job: str, *, tail: int) -> Iterator[api.LogEntry]:
        """Yield the newest ``tail`` lines, then new ones."""
        return self._iterate(self._client.follow_logs(job, tail=tail))

    def events(self, *, job: str | None = None, tail: int) -> tuple[api.EventView, ...]:
        """Return the newest ``tail`` events, of one job or of all."""
        return self._run(self._client.events(job=job, tail=tail))

    def follow_events(self, *, job: str | None = None, tail: int) -> Iterator[api.EventView]:
        """Yield the newest ``tail`` events, then new ones: those of one job until it has ended."""
        return self._iterate(self._client.follow_events(job=job, tail=tail))

    def hosts(self) -> tuple[api.HostView, ...]:
        """Return all hosts that ever joined."""
        return self._run(self._client.hosts())

    def drain(self, host: str, *, deadline_seconds: float | None = None) -> None:
        """Drain a host; at the deadline the workers left on it are ended, and their jobs recover."""
        self._run(self._client.drain(host, deadline_seconds=deadline_seconds))

    def undrain(self, host: str) -> None:
        """Let a drained host take workers again; one that is not drained stays as it is."""
        self._run(self._client.undrain(host))

    def models(self) -> tuple[api.ModelView, ...]:
        """Return the models of jobs whose training has ended, also if they failed later, the newest first."""
        return self._run(self._client.models())

    def webhooks(self) -> tuple[api.WebhookView, ...]:
        """Return the webhooks that the pool calls when a job ends."""
        return self._run(self._client.webhooks())

    def add_webhook(
        self, url: str, *, events: Sequence[str] = ("completed", "failed"), secret: str | None = None
    ) -> api.WebhookCreated:
        """Have the pool call ``url`` when a job ends; return it, with the secret that signs what is sent."""
        return self._run(self._client.add_webhook(url, events=events, secret=secret))

    def remove_webhook(self, webhook: str) -> None:
        """Stop the pool from calling this webhook."""
        self._run(self._client.remove_webhook(webhook))

    def join(
        self, host: str, *, incarnation: int = 0, address: str | None = None, port: int | None = None, nonce: str = ""
    ) -> api.Admission:
        """Request admission of a host; ``incarnation`` is its newest known one.

        With an ``address``, the pool tries to reach it: something there must answer with ``nonce`` on ``port``. Raises
        VersionMismatch if the pool runs another version of Resile than this process.
        """
        return self._run(self._client.join(host, incarnation=incarnation, address=address, port=port, nonce=nonce))
