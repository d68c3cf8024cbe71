"""The commands that show and change what tenants get of the slots."""

from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError
from resile_shared.policies import MAX_QUOTA, MAX_WEIGHT

from .options import Answer, pool_command

if TYPE_CHECKING:
    from resile_shared.http.api import TenantView

    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Show or change the shares of tenants.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant, as in `resile submit --tenant`.")]


@pool_command(app, "list", short_help="List the tenants, with their weights, quotas and caps.")
async def list_tenants(client: "AsyncClient") -> Answer:
    """List the tenants that are configured, and those that have jobs, with what each gets and has."""
    return _shown(await client.tenants())


@pool_command(app, "set", short_help="Change the weight, the quota or the cap of a tenant.", is_keyed=True)
async def set_tenant(
    client: "AsyncClient",
    name: Name,
    *,
    weight: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MAX_WEIGHT, help="Slots are divided in proportion to weights. Default: unchanged."
        ),
    ] = None,
    quota: Annotated[
        int | None,
        typer.Option(
            metavar="SLOTS",
            min=0,
            max=MAX_QUOTA,
            help="Slots that the tenant gets before others, if its jobs can use them. Default: unchanged.",
        ),
    ] = None,
    cap: Annotated[
        int | None,
        typer.Option(
            metavar="SLOTS",
            min=0,
            max=MAX_QUOTA,
            help="Slots that the tenant's jobs never exceed together, even if others are free. Default: unchanged.",
        ),
    ] = None,
) -> Answer:
    r"""Change what a tenant gets of the slots, while jobs train: they follow at their next iteration boundary.

    \b
    resile tenant set vision --weight 2            twice the share of a tenant with weight 1
    resile tenant set vision --quota 16            16 slots before others; those that it leaves idle are borrowed
    resile tenant set vision --quota 0             no quota any more
    resile tenant set vision --cap 24              24 slots at most; --cap 0 is no cap any more

    A tenant that is not configured has weight 1, no quota and no cap. The quotas of all tenants must fit in the pool.
    """
    if weight is None and quota is None and cap is None:
        raise UsageError(f"nothing to change for tenant {name}: use --weight, --quota or --cap")
    return _shown(await client.set_tenant(name, weight=weight, quota=quota, cap=cap))


@pool_command(app, "delete", short_help="Give a tenant the default weight, no quota and no cap.", is_keyed=True)
async def delete_tenant(client: "AsyncClient", name: Name) -> Answer:
    """Delete the settings of a tenant: it has weight 1, no quota and no cap again. Its jobs and its usage stay."""
    return _shown(await client.delete_tenant(name))


def _shown(tenants: "tuple[TenantView, ...]") -> Answer:
    from .tables import tenant_table

    return {"tenants": tenants}, tenant_table(tenants) if tenants else ["there are no tenants yet"]
