"""Handlers for hosts: list, show, drain, undrain, join."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence

from aiohttp import web

from resile_shared.http.api import Admission, DrainHost, Empty, HostList, HostView, JoinHost, Peer
from resile_shared.messages.commands import HostDrain, HostUndrain
from resile_shared.messages.hosts import HostRecord, HostState
from resile_shared.reachability import is_loopback, is_own, obstacle
from resile_shared.storage.objects import PROBE
from resile_shared.version import VERSION, describe_mismatch

from .operations import Operation
from .pool import Pool
from .problems import ProblemError
from .requests import answer, read_body, read_key

MAX_PEERS = 16
"""A new host tries to reach at most this many others."""
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

    @Operation("post", "/v1/hosts/{host}/undrain", "Let a drained host take workers again", Empty)
    async def _undrain(self, request: web.Request) -> web.Response:
        await read_body(request, Empty)
        host = (await self._pool.host(request.match_info["host"])).id
        await self._pool.ask("host", "undrain", HostUndrain(host_id=host), target=host, key=read_key(request))
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
        others = [record for record in self._pool.projection.host_records() if _is_up(record) and record.host != host]
        await _check_is_reached(host, body, others)
        probe = await asyncio.to_thread(self._pool.storage.read, PROBE)
        joining = Admission(
            bus_url=admission.url,
            bus_user=admission.user,
            bus_password=admission.password,
            storage=self._pool.storage.url,
            probe=probe.decode(),
            version=VERSION,
            peers=tuple(_peers(others)),
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


def _is_up(record: HostRecord) -> bool:
    return record.state in (HostState.UP, HostState.DRAINING)


async def _check_is_reached(host: str, body: JoinHost, others: Iterable[HostRecord]) -> None:
    """Raise ProblemError if this machine does not reach the new host where other hosts would.

    A loopback address can be that of a process beside this one: it is of use if all hosts are on this machine.
    """
    if body.address is None or body.port is None:
        return
    why = await obstacle(body.address, body.port, name=body.nonce)
    if not why and is_loopback(body.address):
        elsewhere = (record for record in others if not is_own(record.address))
        why = next((f"{record.host} is on another machine, at {record.address}" for record in elsewhere), "")
    if why:
        raise ProblemError(
            "conflict",
            f"workers on {host} would be at {body.address}, where other hosts do not reach them ({why}): pass an "
            "address of that machine that all hosts reach with --address; a tunnel to the pool alone is not enough",
        )


def _peers(others: Sequence[HostRecord]) -> Iterator[Peer]:
    """Return some of ``others`` for a new host to try, on as many addresses as possible."""
    listening = {record.address: record for record in reversed(others) if record.probe_port}
    for record in [*listening.values()][:MAX_PEERS]:
        assert record.probe_port, "it listens"
        yield Peer(host=record.host, address=record.address, port=record.probe_port)
