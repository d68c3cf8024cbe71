"""`resile host`: this machine as a host of a pool elsewhere, for as long as the command runs."""

import asyncio
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError

from .options import DEFAULT_HOME, print_json
from .stopping import until_stopped

if TYPE_CHECKING:
    from ..client import Server
    from ..pool.joined import JoinOptions

app = typer.Typer(rich_markup_mode=None)


@app.command(
    short_help="Join a pool that runs elsewhere, until Ctrl-C.",
    epilog="Exit status: 0 drained, 1 failed, 2 asked for what cannot be, 130 or 143 ended at once.",
)
def host(
    *,
    join: Annotated[
        str, typer.Option(metavar="URL", help="The pool's address, as its `resile up --listen` prints it.")
    ],
    token: Annotated[
        str, typer.Option(metavar="T", envvar="RESILE_TOKEN", help="The pool's token: in the file `token` of its home.")
    ] = "",
    slots: Annotated[
        int | None, typer.Option(metavar="S", min=1, max=256, help="Slots to offer. Default: what this machine has.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="A label, for `submit --group`; may be repeated.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--host", metavar="NAME", help="Its name in the pool. Default: that of this machine.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR", help="Where workers elsewhere reach those here. Default: the address that reaches the pool."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The agent's own folder. Default: one below joined/ in ~/.resile."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The pool's storage as it is reached from here. Default: as the pool says."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when ready; everything else goes to stderr.")
    ] = False,
) -> int:
    r"""Join a pool that runs elsewhere as one more host, until Ctrl-C or SIGTERM, which drains it.

    \b
    resile up --listen 0.0.0.0 --storage s3://bucket/pool            on one machine; it prints the next line
    resile host --join http://10.0.0.1:8080 --token T --slots 4      on another

    The pool's token and the bus's credentials travel over plain HTTP: use a network that you trust, or a tunnel. This
    machine must reach the pool's API, its bus, its storage, and the workers on all other hosts.
    """
    from resile_learner.agent.settings import own_name

    from ..pool.joined import JoinOptions

    if sys.platform != "linux":
        raise UsageError(f"`resile host` needs Linux, and this is {sys.platform}")
    options = JoinOptions(
        server=_server(join, token),
        name=name or own_name(),
        slots=slots,
        labels=dict(_label(text) for text in label or ()),
        address=_address(address),
        folder=folder.expanduser().absolute() if folder else None,
        storage=storage,
    )
    return asyncio.run(_serve(options, as_json=as_json))


def _server(url: str, token: str) -> "Server":
    from ..client import Server

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--join {url!r} is not a URL: it starts with http:// or https://")
    if not token:
        raise UsageError(f"the pool at {url} wants a token: give it with --token, or put it into RESILE_TOKEN")
    return Server(url.rstrip("/"), token)


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value) or "," in text:
        raise UsageError(f"--label {text!r} is not of the form NAME=VALUE, without commas")
    return name, value


def _address(text: str | None) -> str | None:
    if text is not None:
        try:
            ip_address(text)
        except ValueError:
            raise UsageError(f"--address {text!r} is no IP address: name one of this machine's") from None
    return text


async def _serve(options: "JoinOptions", *, as_json: bool) -> int:
    from ..pool.joined import JoinedHost

    def tell(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    def greet() -> None:
        if as_json:
            print_json({"host_id": options.name, "folder": str(joined.folder), "pid": os.getpid()})
        else:
            tell(f"{options.name} has joined the pool at {options.server.url}; its files are in {joined.folder}")
            tell("Ctrl-C drains it, and it leaves")

    home = Path(os.environ.get("RESILE_HOME") or DEFAULT_HOME)
    joined = JoinedHost(options, home=home, tell=tell)
    return await until_stopped(joined, joined.run(greet), tell=tell, last_word=f"{options.name} has left")
