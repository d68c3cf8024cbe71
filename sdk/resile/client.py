"""A client of a pool's HTTP API.

    async with Client(find_server()) as client:
        job = await client.submit(spec)

Every call raises Unreachable when the pool does not answer, and Refused when it rejects the request.
"""

import asyncio
import errno
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote

import aiohttp
from pydantic import BaseModel, ValidationError

from resile_shared import api
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.jobs import JobSpec
from resile_shared.policies import PolicyName

from .pool.home import read_pool
from .server_sent import read_events

DEFAULT_HOME = Path("~/.resile")
PATIENCE_SECONDS = 60.0  # longer than one silent read
_PAUSE_SECONDS = 0.5
_RETRY_SECONDS = 15.0  # longer than a monitor takes to start again
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)

V = TypeVar("V", bound=BaseModel)


@dataclass(frozen=True)
class Server:
    """URL and token of a pool's API."""

    url: str
    token: str
    advice: str = "check that it is up, and its address"
    """Advice for the user when it does not answer."""
    is_supervised: bool = False
    """Whether `resile up` on this machine restarts it when it exits."""


class Unreachable(ResileError):
    """The pool does not answer."""

    def __init__(self, server: Server, why: str) -> None:
        super().__init__(f"the pool at {server.url} does not answer ({why}): {server.advice}")


class Refused(ResileError):
    """The pool rejected the request. ``code`` is that of `api.Problem`, empty if something else answered."""

    def __init__(self, detail: str, *, status: int, code: str = "") -> None:
        super().__init__(detail)
        self.status, self.code = status, code


def find_server(url: str | None = None, *, home: Path | None = None) -> Server:
    """Find the pool at ``url``, with the token in ``RESILE_TOKEN``, or else that of ``home``. Raises ResileError.

    Without either: the pool at ``RESILE_SERVER``, or else that of ``RESILE_HOME`` or ``~/.resile``.
    """
    if url is None and home is None:
        url = os.environ.get("RESILE_SERVER")
    home = (home or Path(os.environ.get("RESILE_HOME") or DEFAULT_HOME)).expanduser().absolute()
    pool = read_pool(home)
    start = "resile up" if home == DEFAULT_HOME.expanduser() else f"resile up --home {home}"
    if url is None:
        if pool is None:
            raise ResileError(f"no pool is running in {home}: start one with `{start}`")
        if Path(f"/proc/{pool.pid}").exists():
            return Server(pool.url, pool.token, f"its logs are in {home / 'logs'}", is_supervised=True)
        return Server(pool.url, pool.token, f"it was killed: restart it with `{start}`")
    token = os.environ.get("RESILE_TOKEN") or (pool.token if pool and pool.url == url.rstrip("/") else "")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--server {url!r} is not a URL: it must start with http:// or https://")
    if not token:
        raise UsageError(f"the pool at {url} requires a token: set RESILE_TOKEN")
    return Server(url.rstrip("/"), token)


class Client:
    """A connection to one pool; for use with ``async with``."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.token}"}, timeout=_TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def jobs(self) -> tuple[api.JobSummary, ...]:
        """Return all jobs, in the order of their submission."""
        return (await self._get(api.JobList, "jobs")).jobs

    async def job(self, job: str) -> api.JobView:
        """Return one job with the newest 1000 items of its history."""
        return await self._get(api.JobView, f"jobs/{job}")

    async def whole_job(self, job: str) -> api.JobView:
        """Return one job with its whole history."""
        view = await self.job(job)
        history = view.history
        while history and history[0].number > 1:
            page = await self._get(api.HistoryPage, f"jobs/{job}/history", before=history[0].number)
            if not page.items:
                break
            history = (*page.items, *history)
        return view.model_copy(update={"history": history})

    async def spec(self, job: str) -> JobSpec:
        """Return the submitted spec, which `submit` accepts again."""
        return self._read(JobSpec, await self._request("GET", f"jobs/{job}/spec"))

    async def find(self, name: str) -> str:
        """Return the id of the job that has the id ``name``, or is the only one of that name."""
        jobs = await self.jobs()
        if any(job.id == name for job in jobs):
            return name
        found = [job.id for job in jobs if job.name == name]
        if len(found) > 1:
            raise UsageError(f"{len(found)} jobs are named {name}: use one of their ids, {', '.join(found)}")
        if not found:
            raise UsageError(f"there is no job {name}: `resile jobs` lists them")
        return found[0]

    async def upload(self, content: bytes) -> str:
        """Upload packed code (`resile.package.pack`); return its key for `JobSpec.package`."""
        answer = await self._request("POST", "packages", data=content, headers={"Content-Type": "application/gzip"})
        return self._read(api.PackageView, answer).package

    async def submit(self, spec: JobSpec) -> str:
        """Submit a job; return its id once it is stored."""
        return self._read(api.Submission, await self._post("jobs", spec.model_dump(mode="json"))).id

    async def set_priority(self, job: str, priority: int) -> None:
        """Change the priority of a job."""
        await self._post(f"jobs/{job}/priority", {"priority": priority})

    async def stop(self, job: str, *, reason: str = "") -> None:
        """Stop a job for good."""
        await self._post(f"jobs/{job}/stop", {"reason": reason})

    async def pause(self, job: str) -> None:
        """Pause a job: it saves a checkpoint and releases its slots."""
        await self._post(f"jobs/{job}/pause", {})

    async def resume(self, job: str) -> None:
        """Resume a paused job."""
        await self._post(f"jobs/{job}/resume", {})

    async def suspend_all(self) -> tuple[str, ...]:
        """Suspend all jobs, since the pool is about to stop; return those that still hold slots.

        Each saves a checkpoint and goes back to the queue. None starts until the scheduler is started again.
        """
        return self._read(api.Suspension, await self._post("pool/suspend", {})).jobs

    async def policy(self) -> api.PolicyView:
        """Return how jobs share the slots of the pool."""
        return await self._get(api.PolicyView, "policy")

    async def change_policy(
        self, policy: PolicyName | None = None, *, preemption: bool | None = None
    ) -> api.PolicyView:
        """Change how jobs share the slots of the pool, and return it; None leaves it as it is."""
        body = {"policy": policy, "preemption": preemption}
        return self._read(api.PolicyView, await self._request("PUT", "policy", json=body))

    async def tenants(self) -> tuple[api.TenantView, ...]:
        """Return the tenants that are configured, and those that have jobs."""
        return (await self._get(api.TenantList, "tenants")).tenants

    async def set_tenant(
        self, tenant: str, *, weight: int | None = None, quota: int | None = None
    ) -> tuple[api.TenantView, ...]:
        """Change what a tenant gets of the slots, and return all tenants; None leaves it as it is."""
        body = {"weight": weight, "quota": quota}
        answer = await self._request("PUT", f"tenants/{quote(tenant, safe='')}", json=body)
        return self._read(api.TenantList, answer).tenants

    async def delete_tenant(self, tenant: str) -> tuple[api.TenantView, ...]:
        """Give a tenant what one gets that is not configured, and return all tenants."""
        answer = await self._request("DELETE", f"tenants/{quote(tenant, safe='')}")
        return self._read(api.TenantList, answer).tenants

    async def usage(self, *, tenant: str | None = None, hours: int | None = None) -> api.UsageView:
        """Return what was used in the last ``hours``, or ever, by one tenant or by all."""
        query: dict[str, str | int] = {}
        if tenant is not None:
            query["tenant"] = tenant
        if hours is not None:
            query["hours"] = hours
        return await self._get(api.UsageView, "usage", **query)

    async def delete(self, job: str) -> None:
        """Remove a job that has ended, with all that is stored of it: history, logs, checkpoints, model, output."""
        await self._request("DELETE", f"jobs/{job}")

    async def ledger(self, job: str) -> api.LedgerView:
        """Return how often the samples of each epoch were used."""
        return await self._get(api.LedgerView, f"jobs/{job}/ledger")

    async def save_model(self, job: str, file: Path) -> None:
        """Write the final model (safetensors) to ``file``, whole or not at all."""
        await self._download(f"jobs/{job}/model", file)

    async def save_output(self, job: str, file: Path) -> None:
        """Write the files of the workers' output folder to ``file``, a tar."""
        await self._download(f"jobs/{job}/output", file)

    async def logs(self, job: str, *, tail: int) -> tuple[api.LogEntry, ...]:
        """Return the newest ``tail`` lines that the job's workers printed."""
        return (await self._get(api.LogList, f"jobs/{job}/logs", tail=tail)).lines

    def follow_logs(self, job: str, *, tail: int) -> AsyncIterator[api.LogEntry]:
        """Yield the newest ``tail`` lines, then new ones."""
        return self._follow(api.LogEntry, f"jobs/{job}/logs", tail=tail)

    async def events(self, *, job: str | None = None, tail: int) -> tuple[api.EventView, ...]:
        """Return the newest ``tail`` events, of one job or of all."""
        return (await self._get(api.EventList, "events", tail=tail, **({"job": job} if job else {}))).events

    def follow_events(self, *, job: str | None = None, tail: int) -> AsyncIterator[api.EventView]:
        """Yield the newest ``tail`` events, then new ones."""
        return self._follow(api.EventView, "events", tail=tail, **({"job": job} if job else {}))

    async def hosts(self) -> tuple[api.HostView, ...]:
        """Return all hosts that ever joined."""
        return (await self._get(api.HostList, "hosts")).hosts

    async def drain(self, host: str, *, deadline_seconds: float | None = None) -> None:
        """Drain a host; at the deadline the workers left on it are ended, and their jobs recover."""
        await self._post(f"hosts/{quote(host, safe='')}/drain", {"deadline_seconds": deadline_seconds})

    async def join(self, host: str, *, incarnation: int = 0) -> api.Admission:
        """Request admission of a host; ``incarnation`` is its newest known one."""
        path = f"hosts/{quote(host, safe='')}/join"
        return self._read(api.Admission, await self._post(path, {"incarnation": incarnation}))

    async def _get(self, model: type[V], path: str, **query: str | int) -> V:
        return self._read(model, await self._request("GET", path, params=query))

    async def _post(self, path: str, body: Mapping[str, Any]) -> bytes:
        return await self._request("POST", path, json=body)

    async def _request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **options: Any
    ) -> bytes:
        """Send until there is an answer; the idempotency key makes the request take effect once."""
        keyed = {"Idempotency-Key": secrets.token_hex(16), **(headers or {})}
        deadline = time.monotonic() + _RETRY_SECONDS
        while True:
            try:
                async with self._http.request(method, self._url(path), headers=keyed, **options) as answer:
                    await _check(answer, self.server)
                    return await answer.read()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                is_refused = isinstance(error, aiohttp.ClientConnectorError) and not self.server.is_supervised
                if is_refused or time.monotonic() > deadline:
                    raise Unreachable(self.server, _reason(error)) from error
            except Refused as error:
                if error.status != 503 or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _download(self, path: str, file: Path) -> None:
        draft = file.with_name(f".{file.name}.partial")
        try:
            async with self._http.get(self._url(path)) as answer:
                await _check(answer, self.server)
                with draft.open("wb") as target:
                    async for part in answer.content.iter_chunked(1 << 20):
                        target.write(part)
            draft.replace(file)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(self.server, _reason(error)) from error
        finally:
            draft.unlink(missing_ok=True)

    async def _follow(self, model: type[V], path: str, **query: str | int) -> AsyncIterator[V]:
        """Yield events, resuming after the last one when the connection breaks. Raises Unreachable after a minute."""
        last = ""
        broken_since: float | None = None
        while True:
            headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last} if last else {})
            try:
                async with self._http.get(self._url(path), params={**query, "follow": 1}, headers=headers) as answer:
                    await _check(answer, self.server)
                    if answer.status == 204:  # nothing more will come
                        return
                    broken_since = None
                    async for event in read_events(answer.content):
                        last = event.id or last
                        if event.data:
                            yield self._read(model, event.data)
                    why = "connection closed"
            except (aiohttp.ClientError, TimeoutError) as error:
                why = _reason(error)
            except Refused as error:
                if error.status < 500:
                    raise
                why = str(error)
            now = time.monotonic()
            broken_since = now if broken_since is None else broken_since
            if now - broken_since > PATIENCE_SECONDS:
                raise Unreachable(self.server, why)
            await asyncio.sleep(_PAUSE_SECONDS)

    def _url(self, path: str) -> str:
        return f"{self.server.url}/v1/{path}"

    def _read(self, model: type[V], body: bytes | str) -> V:
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            raise ResileError(
                f"{self.server.url} does not answer like a pool of this version: check the address, or update Resile"
            ) from error


async def _check(answer: aiohttp.ClientResponse, server: Server) -> None:
    if answer.status < 400:
        return
    if answer.status == 401:
        raise Refused(
            f"the pool at {server.url} rejects this token: check RESILE_TOKEN", status=401, code="unauthorized"
        )
    try:
        problem = api.Problem.model_validate_json(await answer.read())
    except ValidationError:
        raise Refused(
            f"{server.url} answers {answer.status} {answer.reason}: check that a pool runs there", status=answer.status
        ) from None
    raise Refused(problem.detail, status=problem.status, code=problem.code)


def _reason(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    number = cause.errno if isinstance(cause, OSError) else None
    known = os.strerror(number) if number is not None and number in errno.errorcode else ""
    return known or str(cause) or type(cause).__name__
