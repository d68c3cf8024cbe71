"""The commands that show and change a whole pool: its hosts, page, policy and usage."""

import re
import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError
from resile_shared.policies import POLICIES_HELP, PolicyName

from .options import Answer, pool_command

if TYPE_CHECKING:
    from ..client import AsyncClient
    from ..http_requests import Server

app = typer.Typer(rich_markup_mode=None)
_SINCE = re.compile(r"([0-9]{1,4})([hd])")


@pool_command(app, "hosts", short_help="List all hosts.")
async def list_hosts(client: "AsyncClient") -> Answer:
    """List all hosts that ever joined, with their slots and how many of them are busy."""
    from .tables import host_table

    hosts = await client.hosts()
    return {"hosts": hosts}, host_table(hosts) if hosts else ["there are no hosts yet"]


@pool_command(app, short_help="Move all workers off a host.", is_keyed=True)
async def drain(
    client: "AsyncClient",
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host, as in `resile hosts`.")],
    *,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=0, help="Seconds until the workers left on the host are ended. Default: no limit."
        ),
    ] = None,
) -> Answer:
    """Drain a host: it gets no new workers, and its jobs leave it at an iteration boundary.

    The jobs continue on other hosts, or wait for free slots. At the deadline the workers left on the host are ended,
    and their jobs recover. The host takes workers again after `resile undrain`, or when it has left and returns.
    """
    await client.drain(host, deadline_seconds=deadline)
    return {"host_id": host}, [f"{host} is draining"]


@pool_command(app, short_help="Let a drained host take workers again.", is_keyed=True)
async def undrain(
    client: "AsyncClient",
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host, as in `resile hosts`.")],
) -> Answer:
    """Let a drained host take workers again; a host that is not drained stays as it is.

    Workers that have not left the host yet may stay.
    """
    await client.undrain(host)
    return {"host_id": host}, [f"{host} is not drained"]


@pool_command(app, short_help="Print the address of the pool's page, with the token.")
async def page(
    client: "AsyncClient",
    *,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser of this machine.")] = False,
) -> Answer:
    r"""Print the address of the pool's page. It logs on anyone who opens it: keep it as secret as the token.

    \b
    resile page                               print it
    resile page --open                        open it in a browser
    """
    await client.policy()  # the page would only say that it cannot be reached, or that the token is wrong
    link = page_link(client.server)
    if open_it:
        webbrowser.open(link)
    return {"url": link}, [link]


def page_link(server: "Server") -> str:
    """Return the address of the page; what comes after the # stays in the browser."""
    return f"{server.url}/#token={server.token}" if server.token else server.url


@pool_command(app, short_help="Show or change how jobs share slots.", is_keyed=True)
async def policy(
    client: "AsyncClient",
    name: Annotated[
        PolicyName | None, typer.Argument(metavar="[NAME]", help=f"{POLICIES_HELP}. Default: unchanged.")
    ] = None,
    *,
    preemption: Annotated[
        bool | None,
        typer.Option(
            "--preemption/--no-preemption",
            help="Whether a job may lose slots to another one. Default: unchanged.",
            show_default=False,
        ),
    ] = None,
) -> Answer:
    r"""Show how jobs share slots, or change it while they train.

    \b
    resile policy                             show the policy of the pool
    resile policy priority                    change it: jobs follow at their next iteration boundary
    resile policy fifo --no-preemption        no job loses slots to another one

    The pool keeps the policy until it is changed again, also when it is stopped and started.
    """
    if name is None and preemption is None:
        view = await client.policy()
    else:
        view = await client.change_policy(name, preemption=preemption)
    lines = [f"policy      {view.policy}", f"preemption  {'on' if view.preemption else 'off'}"]
    return {"policy": view.policy, "preemption": view.preemption}, lines


@pool_command(app, short_help="Show slot-hours by tenant and job.")
async def usage(
    client: "AsyncClient",
    *,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Only this tenant. Default: all.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only the last hours or days, as in 24h or 7d, from a full hour on; at most 7d. Default: all usage.",
        ),
    ] = None,
) -> Answer:
    r"""Show the slot-hours that jobs have used, by tenant and job.

    \b
    resile usage                              all usage
    resile usage --since 24h                  in the last day
    resile usage --tenant vision --json       one tenant, with its jobs, as JSON

    A slot counts from its allocation to a job until the job has released it. Removed jobs still count.
    """
    from .tables import moment, usage_table

    view = await client.usage(tenant=tenant, hours=_hours(since) if since is not None else None)
    if tenant is not None and not view.tenants and tenant not in {one.id for one in await client.tenants()}:
        raise UsageError(f"there is no tenant {tenant}: `resile usage` lists the tenants with usage")
    period = f"since {moment(view.since)}" if view.since else "ever"
    return view, usage_table(view) if view.tenants else [f"nothing was used {period}"]


def _hours(since: str) -> int:
    from resile_shared.messages.usage import HOURS_KEPT

    match = _SINCE.fullmatch(since)
    hours = int(match[1]) * (24 if match[2] == "d" else 1) if match else 0
    if not 1 <= hours < HOURS_KEPT:
        raise UsageError(f"--since {since!r} must be from 1h to {HOURS_KEPT - 1}h, or from 1d to 7d")
    return hours
