"""A client of a pool's HTTP API, for asyncio; `sync_client.Client` is the same without it.

    async with AsyncClient(find_server()) as client:
        job = await client.submit(spec)

Every call raises Unreachable when the pool does not answer, and Refused when it rejects the request.
"""

import asyncio
import os
import shlex
import warnings
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self, Unpack
from urllib.parse import quote

from resile_shared.errors import ResileError, UsageError
from resile_shared.http import api
from resile_shared.http.slot_history import SlotsView
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.jobs import JobSpec
from resile_shared.policies import PolicyName
from resile_shared.storage.model_files import format_of
from resile_shared.version import VERSION, VersionMismatch

from .http_requests import LISTING_TIMEOUT, HttpRequests, Server
from .job_options import JobOptions, PackedJob, pack_job
from .pool.home import read_pool

DEFAULT_HOME = Path("~/.resile")
LATEST = "@latest"
"""After the name of jobs: the newest of them."""


def find_server(url: str | None = None, *, home: Path | None = None) -> Server:
    """Find the pool at ``url``, with the token in ``RESILE_TOKEN``, or else that of ``home``. Raises ResileError.

    Without either: the pool at ``RESILE_SERVER``, or else that of ``RESILE_HOME`` or ``~/.resile``.
    """
    if url is None and home is None:
        url = os.environ.get("RESILE_SERVER")
    home = (home or Path(os.environ.get("RESILE_HOME") or DEFAULT_HOME)).expanduser().absolute()
    pool = read_pool(home)
    start = "resile up" if home == DEFAULT_HOME.expanduser() else f"resile up --home {shlex.quote(str(home))}"
    if url is None:
        if pool is None:
            raise ResileError(f"no pool is running in {home}: start one with `{start}`")
        if Path(f"/proc/{pool.pid}").exists():
            return Server(pool.url, pool.token, f"its logs are in {home / 'logs'}", is_supervised=True)
        return Server(pool.url, pool.token, f"it was killed: restart it with `{start}`")
    token = os.environ.get("RESILE_TOKEN", "").strip() or (pool.token if pool and pool.url == url.rstrip("/") else "")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--server {url!r} is not a URL: it must start with http:// or https://")
    if not token:
        raise UsageError(f"the pool at {url} requires a token: set RESILE_TOKEN")
    return Server(url.rstrip("/"), token)


class AsyncClient:
    """A connection to one pool; for use with ``async with``."""

    def __init__(self, server: Server | str | None = None, *, idempotency_key: str | None = None) -> None:
        """Connect to ``server``, or to the one that `find_server` finds for this URL or without it.

        A command that clients send with the same ``idempotency_key`` takes effect once; such a client sends only one.
        """
        self.server = server if isinstance(server, Server) else find_server(server)
        self._requests = HttpRequests(self.server, idempotency_key=idempotency_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._requests.close()

    async def jobs(self) -> tuple[api.JobSummary, ...]:
        """Return all jobs, in the order of their submission."""
        return (await self._requests.get(api.JobList, "jobs")).jobs

    async def job(self, job: str) -> api.JobView:
        """Return one job with the newest 1000 items of its history."""
        return await self._requests.get(api.JobView, f"jobs/{job}")

    async def whole_job(self, job: str) -> api.JobView:
        """Return one job with its whole history."""
        view = await self.job(job)
        history = view.history
        while history and history[0].number > 1:
            page = await self._requests.get(api.HistoryPage, f"jobs/{job}/history", before=history[0].number)
            if not page.items:
                break
            history = (*page.items, *history)
        return view.model_copy(update={"history": history})

    async def spec(self, job: str) -> JobSpec:
        """Return the submitted spec, which `submit` accepts again."""
        return self._requests.parse(JobSpec, await self._requests.request("GET", f"jobs/{job}/spec"))

    async def find(self, name: str, *, newest: bool = False) -> str:
        """Return the id of the job that has the id ``name``, or is the only one of that name.

        Of several, ``NAME@latest`` is the one that was submitted last, and so is ``NAME`` if ``newest``.
        """
        jobs = await self.jobs()
        if any(job.id == name for job in jobs):
            return name
        found = [job.id for job in jobs if job.name == name]
        if not found and name.endswith(LATEST):
            found, newest = [job.id for job in jobs if job.name == name.removesuffix(LATEST)], True
        if not found:
            raise UsageError(f"there is no job {name}: `resile jobs` lists them")
        if len(found) > 1 and not newest:
            ids = ", ".join(found)
            raise UsageError(f"{len(found)} jobs are named {name}: use one of their ids, {ids}, or {name}{LATEST}")
        return found[-1]

    async def find_model(self, name: str) -> str:
        """Return the id of the job ``name``; of several of this name, the one with the newest model, if one has any."""
        models = await self.models()
        named = [model.job for model in models if model.name == name.removesuffix(LATEST)]
        is_id = any(job.id == name for job in await self.jobs())
        return named[0] if named and not is_id else await self.find(name, newest=True)

    async def upload(self, content: bytes) -> str:
        """Upload packed code (`resile.package.pack`); return its key for `JobSpec.package`."""
        answer = await self._requests.request(
            "POST", "packages", data=content, headers={"Content-Type": "application/gzip"}
        )
        return self._requests.parse(api.PackageView, answer).package

    async def submit(self, spec: JobSpec) -> str:
        """Submit a job; return its id once it is stored."""
        return (await self.submission(spec)).id

    async def submission(self, spec: JobSpec) -> api.Submission:
        """Submit a job; return its id once it is stored, and a warning if no host that is up can run it."""
        return self._requests.parse(api.Submission, await self._requests.post("jobs", spec.model_dump(mode="json")))

    async def submit_script(self, path: Path | str, *, args: Sequence[str] = (), **options: Unpack[JobOptions]) -> str:
        """Upload a script, or a folder with one, and submit it with ``args`` as `resile submit` does; return its id.

        Warns of files that are not sent. Raises UsageError if an option is invalid.
        """
        job = await asyncio.to_thread(pack_job, Path(path), args, **options)
        if warning := job.package.warning:
            warnings.warn(warning, stacklevel=2)
        return (await self.submit_packed(job)).id

    async def submit_packed(self, job: PackedJob) -> api.Submission:
        """Upload and submit a job that `pack_job` packed; return its id, and a warning as `submission` does."""
        data = [await self.dataset(name) for name in job.dataset_names]
        return await self.submission(job.spec(package=await self.upload(job.package.content), data=data))

    async def call(self, service: str, method: str, body: bytes, *, seconds: float) -> bytes:
        """Call a method of a service with arguments in JSON; return its result in JSON.

        Raises Refused with a ``code``: failed, invalid, unknown, busy, late or lost (docs/serving.md).
        """
        return await self._requests.call(f"services/{service}/{method}", body, seconds=seconds)

    async def set_priority(self, job: str, priority: int) -> None:
        """Change the priority of a job."""
        await self._requests.post(f"jobs/{job}/priority", {"priority": priority})

    async def stop(self, job: str, *, reason: str = "") -> None:
        """Stop a job for good."""
        await self._requests.post(f"jobs/{job}/stop", {"reason": reason})

    async def pause(self, job: str) -> None:
        """Pause a job: it saves a checkpoint and releases its slots."""
        await self._requests.post(f"jobs/{job}/pause", {})

    async def resume(self, job: str) -> None:
        """Resume a paused job."""
        await self._requests.post(f"jobs/{job}/resume", {})

    async def suspend_all(self) -> tuple[str, ...]:
        """Suspend all jobs, since the pool is about to stop; return those that still hold slots.

        Each saves a checkpoint and goes back to the queue. None starts until the scheduler is started again.
        """
        return self._requests.parse(api.Suspension, await self._requests.post("pool/suspend", {})).jobs

    async def policy(self) -> api.PolicyView:
        """Return how jobs share the slots of the pool."""
        return await self._requests.get(api.PolicyView, "policy")

    async def change_policy(
        self, policy: PolicyName | None = None, *, preemption: bool | None = None
    ) -> api.PolicyView:
        """Change how jobs share the slots of the pool, and return it; None leaves it as it is."""
        body = {"policy": policy, "preemption": preemption}
        return self._requests.parse(api.PolicyView, await self._requests.request("PUT", "policy", json=body))

    async def tenants(self) -> tuple[api.TenantView, ...]:
        """Return the tenants that are configured, and those that have jobs."""
        return (await self._requests.get(api.TenantList, "tenants")).tenants

    async def set_tenant(
        self, tenant: str, *, weight: int | None = None, quota: int | None = None, cap: int | None = None
    ) -> tuple[api.TenantView, ...]:
        """Change what a tenant gets of the slots, and return all tenants; None leaves it as it is, 0 is no cap."""
        body = {"weight": weight, "quota": quota, "cap": cap}
        answer = await self._requests.request("PUT", f"tenants/{quote(tenant, safe='')}", json=body)
        return self._requests.parse(api.TenantList, answer).tenants

    async def delete_tenant(self, tenant: str) -> tuple[api.TenantView, ...]:
        """Reset a tenant to the default weight and quota; return all tenants."""
        answer = await self._requests.request("DELETE", f"tenants/{quote(tenant, safe='')}")
        return self._requests.parse(api.TenantList, answer).tenants

    async def usage(self, *, tenant: str | None = None, hours: int | None = None) -> api.UsageView:
        """Return what was used in the last ``hours``, or ever, by one tenant or by all."""
        query: dict[str, str | int] = {}
        if tenant is not None:
            query["tenant"] = tenant
        if hours is not None:
            query["hours"] = hours
        return await self._requests.get(api.UsageView, "usage", **query)

    async def changes(self, job: str) -> tuple[api.ChangeView, ...]:
        """Return what changed in a job, oldest first."""
        return (await self._requests.get(api.ChangeList, f"jobs/{job}/changes")).changes

    async def trace(self, trace: str) -> api.TraceView:
        """Return the steps of a change. Raises Refused if they are not kept."""
        return await self._requests.get(api.TraceView, f"traces/{trace}")

    async def add_attack(self, trace: str, attack: api.NewAttack) -> None:
        """Add an attack to the steps of the change that it caused. Raises Refused if they are not kept."""
        await self._requests.post(f"traces/{trace}/attacks", attack.model_dump())

    async def delete(self, job: str) -> None:
        """Remove a job that has ended, with all that is stored of it: history, logs, checkpoints, model, output."""
        await self._requests.request("DELETE", f"jobs/{job}")

    async def curves(self, job: str) -> api.CurvesView:
        """Return loss, metrics, scores and speed of a job by iteration, thinned."""
        return await self._requests.get(api.CurvesView, f"jobs/{job}/curves")

    async def slots(self, *, seconds: int = 86_400) -> SlotsView:
        """Return how many slots each job held in the last ``seconds`` before the newest event, thinned."""
        return await self._requests.get(SlotsView, "slots", seconds=seconds)

    async def ledger(self, job: str) -> api.LedgerView:
        """Return how often the samples of each epoch were used."""
        return await self._requests.get(api.LedgerView, f"jobs/{job}/ledger")

    async def datasets(self) -> tuple[Dataset, ...]:
        """Return the data that is registered for jobs, in the order of the names."""
        return (await self._requests.get(api.DatasetList, "datasets")).datasets

    async def dataset(self, name: str) -> Dataset:
        """Return a dataset as it was registered, for `JobSpec.data`."""
        return await self._requests.get(Dataset, f"datasets/{quote(name, safe='')}")

    async def add_dataset(self, name: str, uri: str) -> Dataset:
        """Register what is at ``uri`` now under a name, in place of what was registered under it."""
        path = f"datasets/{quote(name, safe='')}"
        answer = await self._requests.request("PUT", path, json={"uri": uri}, timeout=LISTING_TIMEOUT)
        return self._requests.parse(Dataset, answer)

    async def remove_dataset(self, name: str) -> None:
        """Remove a dataset; its files stay."""
        await self._requests.request("DELETE", f"datasets/{quote(name, safe='')}")

    async def save_code(self, job: str, file: Path) -> None:
        """Write the code that was submitted to ``file``, as a tar.gz."""
        await self._requests.download(f"jobs/{job}/code", file)

    async def save_model(self, job: str, file: Path) -> None:
        """Write the final model to ``file``, whole or not at all: for torch.load if named .pt, else safetensors."""
        await self._requests.download(f"jobs/{job}/model", file, format=format_of(file))

    async def save_output(self, job: str, file: Path) -> None:
        """Write the files of the workers' output folder to ``file``, a tar."""
        await self._requests.download(f"jobs/{job}/output", file)

    async def logs(self, job: str, *, tail: int) -> tuple[api.LogEntry, ...]:
        """Return the newest ``tail`` lines that the job's workers printed."""
        return (await self._requests.get(api.LogList, f"jobs/{job}/logs", tail=tail)).lines

    def follow_logs(self, job: str, *, tail: int) -> AsyncIterator[api.LogEntry]:
        """Yield the newest ``tail`` lines, then new ones."""
        return self._requests.follow(api.LogEntry, f"jobs/{job}/logs", tail=tail)

    async def events(self, *, job: str | None = None, tail: int) -> tuple[api.EventView, ...]:
        """Return the newest ``tail`` events, of one job or of all."""
        return (await self._requests.get(api.EventList, "events", tail=tail, **({"job": job} if job else {}))).events

    def follow_events(self, *, job: str | None = None, tail: int) -> AsyncIterator[api.EventView]:
        """Yield the newest ``tail`` events, then new ones: those of one job until it has ended."""
        return self._requests.follow(api.EventView, "events", tail=tail, **({"job": job} if job else {}))

    async def hosts(self) -> tuple[api.HostView, ...]:
        """Return all hosts that ever joined."""
        return (await self._requests.get(api.HostList, "hosts")).hosts

    async def drain(self, host: str, *, deadline_seconds: float | None = None) -> None:
        """Drain a host; at the deadline the workers left on it are ended, and their jobs recover."""
        await self._requests.post(f"hosts/{quote(host, safe='')}/drain", {"deadline_seconds": deadline_seconds})

    async def undrain(self, host: str) -> None:
        """Let a drained host take workers again; one that is not drained stays as it is."""
        await self._requests.post(f"hosts/{quote(host, safe='')}/undrain", {})

    async def models(self) -> tuple[api.ModelView, ...]:
        """Return the models of jobs whose training has ended, also if they failed later, the newest first."""
        return (await self._requests.get(api.ModelList, "models")).models

    async def webhooks(self) -> tuple[api.WebhookView, ...]:
        """Return the webhooks that the pool calls when a job ends."""
        return (await self._requests.get(api.WebhookList, "webhooks")).webhooks

    async def add_webhook(
        self, url: str, *, events: Sequence[str] = ("completed", "failed"), secret: str | None = None
    ) -> api.WebhookCreated:
        """Have the pool call ``url`` when a job ends; return it, with the secret that signs what is sent."""
        body = {"url": url, "events": list(events), "secret": secret}
        return self._requests.parse(api.WebhookCreated, await self._requests.post("webhooks", body))

    async def remove_webhook(self, webhook: str) -> None:
        """Stop the pool from calling this webhook."""
        await self._requests.request("DELETE", f"webhooks/{quote(webhook, safe='')}")

    async def join(
        self, host: str, *, incarnation: int = 0, address: str | None = None, port: int | None = None, nonce: str = ""
    ) -> api.Admission:
        """Request admission of a host; ``incarnation`` is its newest known one.

        With an ``address``, the pool tries to reach it: something there must answer with ``nonce`` on ``port``. Raises
        VersionMismatch if the pool runs another version of Resile than this process.
        """
        body = {"incarnation": incarnation, "version": VERSION, "address": address, "port": port, "nonce": nonce}
        answer = await self._requests.post(f"hosts/{quote(host, safe='')}/join", body)
        admission = self._requests.parse(api.Admission, answer)
        if admission.version != VERSION:
            raise VersionMismatch(pool=admission.version)
        return admission
