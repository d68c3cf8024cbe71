"""The command that prints where the page of a pool is."""

import webbrowser
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Answer, pool_command

if TYPE_CHECKING:
    from ..client import AsyncClient
    from ..http_requests import Server

app = typer.Typer(rich_markup_mode=None)


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
