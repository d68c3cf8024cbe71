"""The commands that show and drain hosts."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import Answer, pool_command

if TYPE_CHECKING:
    from ..client import AsyncClient

app = typer.Typer(rich_markup_mode=None)


@pool_command(app, "hosts", short_help="List all hosts.")
async def list_hosts(client: "AsyncClient") -> Answer:
    """List all hosts that ever joined, with their slots and how many of them are busy."""
    from .tables import host_table

    hosts = await client.hosts()
    return {"hosts": hosts}, host_table(hosts) if hosts else ["there are no hosts yet"]


@pool_command(app, short_help="Move all workers off a host.")
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
    and their jobs recover. The host takes workers again when its agent restarts.
    """
    await client.drain(host, deadline_seconds=deadline)
    return {"host_id": host}, [f"{host} is draining"]
