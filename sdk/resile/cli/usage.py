"""The command that shows what was used."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError

from .options import Answer, pool_command

if TYPE_CHECKING:
    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None)
_SINCE = re.compile(r"([0-9]{1,4})([hd])")


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
