"""The commands that show hosts and change them."""

from typing import TYPE_CHECKING, Annotated

import typer

from .options import DEFAULT_HOME, AsJson, Home, Server, print_json, print_lines, reach

if TYPE_CHECKING:
    from resile_shared.api import HostView

    from ..client import Client

app = typer.Typer(rich_markup_mode=None)


@app.command("hosts", short_help="List all hosts.")
def list_hosts(*, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """List all hosts that were ever seen, with their slots and how many of them are busy."""
    from .tables import host_table

    async def work(client: "Client") -> "tuple[HostView, ...]":
        return await client.hosts()

    hosts = reach(work, server=server, home=home, as_json=as_json)
    if as_json:
        print_json({"hosts": hosts})
    else:
        print_lines(host_table(hosts) if hosts else ["there are no hosts yet"])


@app.command(short_help="Have a host let go of its workers, and take no more.")
def drain(
    host: Annotated[str, typer.Argument(metavar="HOST", help="The host, as `resile hosts` names it.")],
    *,
    deadline: Annotated[
        float | None,
        typer.Option(metavar="S", min=0, help="Seconds after which workers that are left are killed. Default: never."),
    ] = None,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Have a host let go of its workers at their next boundary, and take no more.

    Its jobs carry on elsewhere, or wait for room.
    """

    async def work(client: "Client") -> None:
        await client.drain(host, deadline_seconds=deadline)

    reach(work, server=server, home=home, as_json=as_json)
    if as_json:
        print_json({"host_id": host})
    else:
        typer.echo(f"{host} drains")
