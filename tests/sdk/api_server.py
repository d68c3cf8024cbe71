"""A small real HTTP server that answers as a pool's API does, in a thread of its own."""

import asyncio
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from resile_shared.http import api
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.hosts import HostState
from resile_shared.messages.jobs import HistoryItem, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import EpochCount
from resile_shared.policies import PolicyName

TOKEN = "secret-of-the-pool"
TIME = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)


def job_view(job: str, **changes: Any) -> api.JobView:
    """A job in the middle of its training, or as ``changes`` has it."""
    item = HistoryItem(
        number=1,
        time=TIME,
        kind="allocation",
        generation=1,
        workers=2,
        slots=("host-1/0", "host-1/1"),
        iteration=0,
        reason="start",
    )
    fields: dict[str, Any] = {
        "id": job,
        "name": "digits",
        "tenant": "default",
        "state": JobState.RUNNING,
        "reason": "",
        "priority": 5000,
        "min_workers": 1,
        "max_workers": 4,
        "workers": 2,
        "slots": item.slots,
        "generation": 1,
        "iteration": 50,
        "iterations_total": 120,
        "epoch": 2,
        "epochs": 6,
        "samples_seen": 2400,
        "loss": 0.25,
        "metrics": {},
        "validation": {},
        "iteration_seconds": 0.1,
        "seconds_left": 7.0,
        "submitted": TIME,
        "bits": "same bits",
        "params_sha256": None,
        "script": "train.py",
        "args": ("--lr", "0.1"),
        "group": "",
        "checkpoint": None,
        "history": (item,),
    }
    return api.JobView.model_validate({**fields, **changes})


CHANGE = api.ChangeView(
    number=1,
    items=(1, 2),
    kind="recovery",
    time=TIME,
    seconds=0.13,
    generation=1,
    iteration=7,
    workers_before=5,
    workers=3,
    reason="host-2 lost",
    summary="host-2 was lost at 2026-01-02T03:04:05.678Z; training went on after 0.13 s.",
    trace="ab" * 16,
    has_spans=True,
)


def step(number: int, name: str, *, parent: int | None = None, **attributes: Any) -> api.TraceSpan:
    """A step of a change that took a tenth of a second."""
    return api.TraceSpan(
        id=f"{number:016x}",
        parent=None if parent is None else f"{parent:016x}",
        name=name,
        service="learner",
        begin=TIME.timestamp() + number / 10,
        seconds=0.1,
        attributes={f"resile.{key}": value for key, value in attributes.items()},
        events=(),
        links=(),
        error=None,
    )


STEPS = (
    step(1, "worker suspected", job="digits-1", worker=0),
    step(2, "handle resile.suspicion.{job}", parent=1),
    step(3, "recover", parent=2, job="digits-1", worker=0),
    step(4, "start worker", parent=3, job="other-1", worker=3),
)
HOST = api.HostView(
    id="host-1",
    state=HostState.UP,
    reason="",
    incarnation=1,
    address="127.0.0.1",
    labels={"zone": "a"},
    device_class="cpu",
    slots=tuple(
        api.SlotView(name=f"host-1/{slot}", device="cpu", job=job, worker=None, worker_state=None)
        for slot, job in enumerate(("digits-1", None))
    ),
    since=TIME,
)


class ApiServer:
    """What the server holds, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.jobs = {"digits-1": job_view("digits-1")}
        self.asked: list[tuple[str, Any]] = []
        self.keys: list[str] = []
        self.packages: list[bytes] = []
        self.listing_seconds = 0.0
        """How long the source of a dataset takes to list."""
        self.before: list[Callable[[], object]] = []
        """What happens before each of the next answers that show jobs."""
        self.num_lost_answers = 0
        """How many of the next requests are handled, but never answered."""
        self.is_unavailable = False
        """Whether no command is answered by what should carry it out."""
        self.lines = [
            api.LogEntry(sequence=n, time=TIME, host="host-1", worker=0, stream="stdout", text=f"line {n}")
            for n in range(1, 11)
        ]
        self.events = [
            api.EventView(stream="events", sequence=n, time=TIME, subject=f"resile.job.digits-1.event{n}", data={})
            for n in range(1, 11)
        ]

    def application(self) -> web.Application:
        """Return the web application."""
        application = web.Application(middlewares=[self._guard])
        application.add_routes(
            [
                web.get("/v1/jobs", self._list),
                web.get("/v1/models", self._models),
                web.post("/v1/jobs", self._submit),
                web.get("/v1/jobs/{job}", self._show),
                web.get("/v1/jobs/{job}/ledger", self._ledger),
                web.get("/v1/jobs/{job}/changes", self._changes),
                web.get("/v1/traces/{trace}", self._trace),
                web.get("/v1/jobs/{job}/model", self._model),
                web.get("/v1/jobs/{job}/output", self._output),
                web.get("/v1/jobs/{job}/logs", self._logs),
                web.get("/v1/events", self._events),
                web.post("/v1/jobs/{job}/{verb}", self._change),
                web.get("/v1/hosts", self._hosts),
                web.get("/v1/policy", self._policy),
                web.put("/v1/policy", self._policy),
                web.get("/v1/usage", self._usage),
                web.get("/v1/tenants", self._tenants),
                web.put("/v1/tenants/{tenant}", self._tenants),
                web.delete("/v1/tenants/{tenant}", self._tenants),
                web.post("/v1/hosts/{host}/drain", self._change),
                web.post("/v1/hosts/{host}/undrain", self._change),
                web.post("/v1/hosts/{host}/join", self._join),
                web.post("/v1/packages", self._package),
                web.get("/v1/datasets/{dataset}", self._dataset),
                web.put("/v1/datasets/{dataset}", self._add_dataset),
            ]
        )
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.num_lost_answers:
            self.num_lost_answers -= 1
            assert request.transport is not None
            request.transport.abort()
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return problem(401, "unauthorized", "no")
        if request.method == "POST":
            self.keys.append(request.headers["Idempotency-Key"])
            if self.is_unavailable:
                return problem(503, "unavailable", "no answer: send it again with the same Idempotency-Key")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _list(self, _: web.Request) -> web.Response:
        self._begin()
        return answer(api.JobList(jobs=tuple(self.jobs.values())))

    def _begin(self) -> None:
        if self.before:
            self.before.pop(0)()

    async def _show(self, request: web.Request) -> web.Response:
        self._begin()
        job = request.match_info["job"]
        return answer(self.jobs[job]) if job in self.jobs else problem(404, "unknown", f"there is no job {job}")

    async def _submit(self, request: web.Request) -> web.Response:
        spec = JobSpec.model_validate_json(await request.read())
        self.asked.append(("submit", spec))
        self.jobs["new-1"] = job_view("new-1", name=spec.name)
        return answer(api.Submission(id="new-1"), status=201)

    async def _change(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        job = self.jobs.get(request.match_info.get("job", ""))
        if job is not None and job.state.is_final:
            return problem(409, "conflict", f"job {job.id} is {job.state.value} and cannot change any more")
        return web.json_response({})

    async def _package(self, request: web.Request) -> web.Response:
        self.packages.append(await request.read())
        return answer(api.PackageView(package="packages/abc.tar.gz"), status=201)

    async def _add_dataset(self, request: web.Request) -> web.Response:
        await asyncio.sleep(self.listing_seconds)
        return answer(_dataset(request.match_info["dataset"], uri=(await request.json())["uri"]))

    async def _dataset(self, request: web.Request) -> web.Response:
        return answer(_dataset(request.match_info["dataset"], uri="s3://bucket/few"))

    async def _hosts(self, _: web.Request) -> web.Response:
        return answer(api.HostList(hosts=(HOST,)))

    async def _policy(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            self.asked.append((request.path, await request.json()))
        return answer(api.PolicyView(policy=PolicyName.FIFO, preemption=False))

    async def _tenants(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            body = await request.json() if request.method == "PUT" else request.method
            self.asked.append((request.path, body))
        vision = api.TenantView(id="vision", weight=2, quota=16, is_configured=True, jobs=1, workers=8)
        return answer(api.TenantList(tenants=(vision,)))

    async def _usage(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, dict(request.query)))
        job = api.JobUsageView(id="job-1", name="digits", slot_hours=1.5, slots=4)
        vision = api.TenantUsageView(tenant="vision", slot_hours=4.0, removed_slot_hours=2.5, slots=4, jobs=(job,))
        tenants = (vision,) if request.query.get("tenant", "vision") == "vision" else ()
        return answer(api.UsageView(since=None, until=at(0.0), tenants=tenants))

    async def _join(self, _: web.Request) -> web.Response:
        """As a pool of another version does."""
        bus = {"bus_url": "nats://127.0.0.1:1", "bus_user": "learner", "bus_password": "secret"}
        return answer(api.Admission(**bus, storage="file:///nowhere", probe="", version="9.9.9"))

    async def _ledger(self, _: web.Request) -> web.Response:
        return answer(api.LedgerView(epochs=(EpochCount(epoch=0, samples=96, once=96, more=0, never=0),)))

    async def _changes(self, _: web.Request) -> web.Response:
        return answer(api.ChangeList(changes=(CHANGE,)))

    async def _trace(self, request: web.Request) -> web.Response:
        return answer(api.TraceView(id=request.match_info["trace"], spans=STEPS, dropped=2))

    async def _model(self, request: web.Request) -> web.Response:
        if not self.jobs[request.match_info["job"]].state.is_final:
            return problem(409, "conflict", "the job has no model yet: wait for its end")
        return web.Response(body=b"model" + request.query["format"].encode())

    async def _output(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(2 * tarfile.BLOCKSIZE))

    async def _models(self, _: web.Request) -> web.Response:
        """Those of jobs that have ended."""
        fields = (
            "name",
            "tenant",
            "state",
            "reason",
            "samples_seen",
            "loss",
            "metrics",
            "validation",
            "bits",
            "script",
            "args",
        )
        models = [
            api.ModelView(
                job=job.id,
                completed=TIME,
                iterations=job.iteration,
                params_sha256=job.params_sha256 or "",
                **{name: getattr(job, name) for name in fields},
            )
            for job in self.jobs.values()
            if job.state.is_final
        ]
        return answer(api.ModelList(models=tuple(models)))

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        """With ``follow`` two lines at a time; then the connection breaks. Nothing follows the end of a job."""
        if "follow" not in request.query:
            return answer(api.LogList(lines=tuple(self.lines[-int(request.query["tail"]) :])))
        start = _position(request)
        if self.jobs[request.match_info["job"]].state.is_final and start >= len(self.lines):
            return web.Response(status=204)
        return await _two_at_a_time(request, [(line.sequence, line) for line in self.lines], start)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Two at a time; then the connection breaks. Nothing follows the end of a job."""
        start, job = _position(request), self.jobs.get(request.query.get("job", ""))
        if job and job.state.is_final and start >= len(self.events):
            return web.Response(status=204)
        return await _two_at_a_time(request, [(event.sequence, event) for event in self.events], start)


def _position(request: web.Request) -> int:
    return int(request.headers.get("Last-Event-ID", "logs:0").partition(":")[2])


async def _two_at_a_time(request: web.Request, entries: list[tuple[int, api.View]], start: int) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for sequence, view in entries[start : start + 2]:
        await stream.write(f": a comment\nid: logs:{sequence}\ndata: {view.model_dump_json()}\n\n".encode())
    await stream.write(b"id: logs:999\ndata: half an ev")
    return stream


def answer(view: api.View, *, status: int = 200) -> web.Response:
    """A view as an answer."""
    return web.Response(text=view.model_dump_json(), content_type="application/json", status=status)


def problem(status: int, code: Any, detail: str) -> web.Response:
    """A failure as an answer."""
    document = api.Problem(title="Problem", status=status, detail=detail, code=code)
    return web.Response(text=document.model_dump_json(), content_type="application/problem+json", status=status)


@contextmanager
def serving(server: ApiServer) -> Iterator[None]:
    """Run the server while the block runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    runner = web.AppRunner(server.application())
    try:
        asyncio.run_coroutine_threadsafe(_start(runner, server), loop).result()
        yield
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _start(runner: web.AppRunner, server: ApiServer) -> None:
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"


def _dataset(name: str, *, uri: str) -> Dataset:
    return Dataset(name=name, uri=uri, num_files=1, num_bytes=1, version="0" * 64)
