"""The commands that show and drain hosts."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_HOME, AsJson, Home, Server, print_json, print_lines, reach

if TYPE_CHECKING:
    from resile_shared.api import HostView

    from ..client import Client

app = typer.Typer(rich_markup_mode=None)


@app.command("hosts", short_help="List all hosts.")
def list_hosts(*, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """List all hosts that ever joined, with their slots and how many of them are busy."""
    from .tables import host_table

    async def work(client: "Client") -> "tuple[HostView, ...]":
        return await client.hosts()

    hosts = reach(work, server=server, home=home, as_json=as_json)
    if as_json:
        print_json({"hosts": hosts})
    else:
        print_lines(host_table(hosts) if hosts else ["there are no hosts yet"])


@app.command(short_help="Move all workers off a host.")
def drain(
    host: Annotated[str, typer.Argument(metavar="HOST", help="Name of the host, as in `resile hosts`.")],
    *,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=0, help="Seconds until the workers left on the host are ended. Default: no limit."
        ),
    ] = None,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Drain a host: it gets no new workers, and its jobs leave it at an iteration boundary.

    The jobs continue on other hosts, or wait for free slots. At the deadline the workers left on the host are ended,
    and their jobs recover. The host takes workers again when its agent restarts.
    """

    async def work(client: "Client") -> None:
        await client.drain(host, deadline_seconds=deadline)

    reach(work, server=server, home=home, as_json=as_json)
    if as_json:
        print_json({"host_id": host})
    else:
        typer.echo(f"{host} is draining")
