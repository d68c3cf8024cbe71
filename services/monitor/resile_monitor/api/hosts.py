"""Handlers for hosts: list, show, drain, join."""

import asyncio
import re

from aiohttp import web

from resile_shared.http.api import Admission, DrainHost, Empty, HostList, HostView, JoinHost
from resile_shared.messages.commands import HostDrain
from resile_shared.messages.hosts import HostState
from resile_shared.storage.objects import PROBE
from resile_shared.version import VERSION, describe_mismatch

from .operations import Operation
from .pool import Pool
from .problems import ProblemError
from .requests import answer, read_body, read_key

HOST_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Hosts:
    """The handlers below ``/v1/hosts``."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @Operation("get", "/v1/hosts", "All hosts, and what runs on their slots", HostList)
    async def _list(self, _: web.Request) -> web.Response:
        return answer(self._pool.projection.hosts())

    @Operation("get", "/v1/hosts/{host}", "One host", HostView)
    async def _view(self, request: web.Request) -> web.Response:
        return answer(await self._pool.host(request.match_info["host"]))

    @Operation("post", "/v1/hosts/{host}/drain", "Free a host of workers", Empty, body=DrainHost)
    async def _drain(self, request: web.Request) -> web.Response:
        body = await read_body(request, DrainHost)
        host = (await self._pool.host(request.match_info["host"])).id
        command = HostDrain(host_id=host, deadline_seconds=body.deadline_seconds)
        await self._pool.ask("host", "drain", command, target=host, key=read_key(request))
        return answer(Empty())

    @Operation(
        "post", "/v1/hosts/{host}/join", "What a new host's agent needs", Admission, body=JoinHost, is_keyed=False
    )
    async def _join(self, request: web.Request) -> web.Response:
        body = await read_body(request, JoinHost)
        host = request.match_info["host"]
        admission = self._pool.admission
        if admission is None:
            raise ProblemError(
                "conflict", "other machines cannot join this pool: start it with `resile up --listen ADDR`"
            )
        if not body.version:  # others compare it with that of the pool
            raise ProblemError("conflict", describe_mismatch("this machine", body.version))
        await self._check_is_free(host, incarnation=body.incarnation)
        probe = await asyncio.to_thread(self._pool.storage.read, PROBE)
        joining = Admission(
            bus_url=admission.url,
            bus_user=admission.user,
            bus_password=admission.password,
            storage=self._pool.storage.url,
            probe=probe.decode(),
            version=VERSION,
        )
        return answer(joining)

    async def _check_is_free(self, host: str, *, incarnation: int) -> None:
        """Raise ProblemError unless the host is new, or returns after it was here."""
        if not HOST_NAME.fullmatch(host):
            raise ProblemError("invalid", f"invalid host name {host!r}: use 1 to 64 letters, digits, - and _")
        try:
            known = await self._pool.host(host)
        except ProblemError as error:
            if error.code != "unknown":
                raise
            return
        if known.state in (HostState.UP, HostState.DRAINING) and known.incarnation > incarnation:
            raise ProblemError(
                "conflict",
                f"a host named {host} is already {known.state.value} at {known.address}: choose another name",
            )
