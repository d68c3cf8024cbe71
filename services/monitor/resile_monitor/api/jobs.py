"""Handlers for jobs: list, show, submit, change."""

import asyncio

from aiohttp import web

from resile_shared.http.api import (
    CurvesView,
    Empty,
    HistoryPage,
    JobList,
    JobView,
    LedgerView,
    NewPriority,
    StopJob,
    Submission,
    Suspension,
)
from resile_shared.messages.commands import JobDelete, JobPause, JobPriority, JobResume, JobStop, JobSubmit
from resile_shared.messages.jobs import JobSpec
from resile_shared.messages.message import MAX_INTEGER, Message, Positive

from .operations import Operation
from .packages import check_is_stored
from .pool import Pool
from .requests import answer, build, read_body, read_key, read_query


class HistoryQuery(Message):
    """The parameters of ``GET /v1/jobs/{job}/history``."""

    before: Positive = MAX_INTEGER


class Jobs:
    """The handlers below ``/v1/jobs`` that speak JSON, and the one that suspends all jobs."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/jobs", "All jobs", JobList)
    async def _list(self, _: web.Request) -> web.Response:
        return answer(await self._pool.jobs())

    @Operation("get", "/v1/jobs/{job}", "One job, with its history", JobView)
    async def _view(self, request: web.Request) -> web.Response:
        return answer(await self._pool.job(request.match_info["job"]))

    @Operation("get", "/v1/jobs/{job}/history", "A page of a job's history", HistoryPage, query=HistoryQuery)
    async def _history(self, request: web.Request) -> web.Response:
        query = read_query(request, HistoryQuery)
        record = await self._pool.record(request.match_info["job"])
        return answer(HistoryPage(items=await self._pool.history(record, before=query.before)))

    @Operation("get", "/v1/jobs/{job}/spec", "What was submitted", JobSpec)
    async def _spec(self, request: web.Request) -> web.Response:
        return answer((await self._pool.record(request.match_info["job"])).spec)

    @Operation("get", "/v1/jobs/{job}/curves", "Loss, metrics, scores and speed, thinned", CurvesView)
    async def _curves(self, request: web.Request) -> web.Response:
        return answer(await self._pool.job_curves(await self._named(request)))

    @Operation("get", "/v1/jobs/{job}/ledger", "How often each epoch's samples were used", LedgerView)
    async def _ledger(self, request: web.Request) -> web.Response:
        record = await self._pool.record(request.match_info["job"])
        return answer(LedgerView(epochs=record.completed.ledger if record.completed else ()))

    @Operation("post", "/v1/jobs", "Submit a job", Submission, status=201, body=JobSpec)
    async def _submit(self, request: web.Request) -> web.Response:
        spec = await read_body(request, JobSpec)
        await asyncio.to_thread(check_is_stored, self._pool.storage, spec.package)
        accepted = await self._pool.ask("job", "submit", JobSubmit(spec=spec), key=read_key(request))
        assert accepted.job_id is not None
        return answer(Submission(id=accepted.job_id, warning=accepted.warning), status=201)

    @Operation("post", "/v1/jobs/{job}/priority", "Change the priority of a job", Empty, body=NewPriority)
    async def _prioritise(self, request: web.Request) -> web.Response:
        body = await read_body(request, NewPriority)
        job = await self._named(request)
        return await self._change(request, "priority", JobPriority(job_id=job, priority=body.priority))

    @Operation("post", "/v1/jobs/{job}/stop", "End a job for good", Empty, body=StopJob)
    async def _stop(self, request: web.Request) -> web.Response:
        body = await read_body(request, StopJob)
        return await self._change(request, "stop", JobStop(job_id=await self._named(request), reason=body.reason))

    @Operation(
        "post", "/v1/jobs/{job}/pause", "Pause a job: save a checkpoint, then release all its slots", Empty, body=Empty
    )
    async def _pause(self, request: web.Request) -> web.Response:
        await read_body(request, Empty)
        return await self._change(request, "pause", JobPause(job_id=await self._named(request)))

    @Operation("post", "/v1/jobs/{job}/resume", "Resume a paused job", Empty, body=Empty)
    async def _resume(self, request: web.Request) -> web.Response:
        await read_body(request, Empty)
        return await self._change(request, "resume", JobResume(job_id=await self._named(request)))

    @Operation("post", "/v1/pool/suspend", "Save all jobs before the pool stops", Suspension, body=Empty)
    async def _suspend(self, request: web.Request) -> web.Response:
        await read_body(request, Empty)
        return answer(Suspension(jobs=await self._pool.suspend(key=read_key(request))))

    @Operation("delete", "/v1/jobs/{job}", "Remove a job that has ended, with everything stored for it", Empty)
    async def _delete(self, request: web.Request) -> web.Response:
        if read_key(request) is None:
            await self._named(request)
        command = build(JobDelete, {"job_id": request.match_info["job"]})  # with a key it may be gone already
        return await self._change(request, "delete", command)

    async def _named(self, request: web.Request) -> str:
        return (await self._pool.record(request.match_info["job"])).job

    async def _change(self, request: web.Request, verb: str, command: Message) -> web.Response:
        await self._pool.ask("job", verb, command, target=request.match_info["job"], key=read_key(request))
        return answer(Empty())
