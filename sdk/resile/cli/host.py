"""`resile host`: joins this machine to a pool elsewhere, for as long as the command runs."""

import asyncio
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError
from resile_shared.text import is_line

from .options import DEFAULT_DATA_CACHE, DEFAULT_HOME, DataCache, logger_beside, show
from .stopping import StopMessages, until_stopped

if TYPE_CHECKING:
    from ..http_requests import Server
    from ..pool.joined import JoinOptions

app = typer.Typer(rich_markup_mode=None)


@app.command(
    short_help="Join this machine to a pool elsewhere, until Ctrl-C.",
    epilog="Exit status: 0 drained, 1 failed or not drained, 2 invalid arguments, 130 or 143 stopped at once.",
)
def host(
    *,
    join: Annotated[str, typer.Option(metavar="URL", help="URL of the pool, as `resile up --listen` prints it.")],
    token: Annotated[
        str,
        typer.Option(
            metavar="T",
            envvar="RESILE_TOKEN",
            help="Token of the pool. On the command line everyone on this machine can read it: use --token-file.",
        ),
    ] = "",
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read the token from here: a copy of `token` in the pool's home; -: stdin."),
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(metavar="S", min=1, max=256, help="Number of slots. Default: as many as this machine has."),
    ] = None,
    data_cache: DataCache = DEFAULT_DATA_CACHE,
    label: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="A label for `submit --group`; may be repeated.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--host", metavar="NAME", help="Name of the host in the pool. Default: the name of this machine."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDR",
            help="IP address of this machine for workers on other hosts. Default: the one used to reach the pool.",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the agent. Default: one below ~/.resile/joined."),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of the pool's storage as seen from this machine. Default: the URL that the pool uses.",
        ),
    ] = None,
    grace_seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, max=86400, help="Seconds that Ctrl-C gives jobs to leave this host."),
    ] = 120.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when ready; everything else goes to stderr.")
    ] = False,
) -> int:
    r"""Join this machine to a pool elsewhere as one more host. Ctrl-C or SIGTERM drains it.

    \b
    resile up --listen 0.0.0.0 --storage s3://bucket/pool            on one machine; prints the next line
    resile host --join http://10.0.0.1:8080 --token-file token       on another, with a copy of that file

    The pool's token and the bus credentials are sent over plain HTTP: use a trusted network, or a tunnel. This machine
    must reach the pool's API, its bus, its storage, and the workers on all other hosts.
    """
    from resile_learner.agent.settings import own_name

    from ..pool.joined import JoinOptions

    if sys.platform != "linux":
        raise UsageError(f"`resile host` requires Linux; this machine runs {sys.platform}")
    options = JoinOptions(
        server=_server(join, _read_token(token_file) if token_file else token),
        name=name or own_name(),
        slots=slots,
        data_cache_bytes=int(data_cache * 1e9),
        labels=dict(_label(text) for text in label or ()),
        address=_address(address),
        folder=folder.expanduser().absolute() if folder else None,
        storage=storage,
        grace_seconds=grace_seconds,
    )
    return asyncio.run(_serve(options, as_json=as_json))


def _server(url: str, token: str) -> "Server":
    from ..http_requests import Server

    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--join {url!r} is not a URL: it must start with http:// or https://")
    token = token.strip()
    if not token:
        raise UsageError(f"the pool at {url} requires a token: pass it with --token-file or RESILE_TOKEN")
    return Server(url.rstrip("/"), token)


def _read_token(file: Path) -> str:
    try:
        return (sys.stdin.read() if file == Path("-") else file.read_text()).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {file} cannot be read: {error}") from error


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value and is_line(text)) or "," in text:
        raise UsageError(f"--label {text!r}: must have the form NAME=VALUE, without commas and control characters")
    return name, value


def _address(text: str | None) -> str | None:
    if text is not None:
        try:
            address = ip_address(text)
        except ValueError:
            raise UsageError(f"--address {text!r} is not an IP address: use one of this machine") from None
        if address.version != 4:
            raise UsageError(f"--address {text}: workers listen on IPv4 only: use an IPv4 address of this machine")
    return text


async def _serve(options: "JoinOptions", *, as_json: bool) -> int:
    from ..pool.joined import JoinedHost

    def on_ready() -> None:
        lines = [
            f"{options.name} has joined the pool at {options.server.url}; its folder is {joined.folder}",
            "press Ctrl-C to drain it and leave the pool",
        ]
        show({"host_id": options.name, "folder": str(joined.folder), "pid": os.getpid()}, lines, as_json=as_json)

    log = logger_beside(as_json=as_json)
    home = Path(os.environ.get("RESILE_HOME") or DEFAULT_HOME)
    joined = JoinedHost(options, home=home, log=log)
    messages = StopMessages(
        first="draining; press Ctrl-C again to stop at once",
        second="stopping at once: jobs that run here alone lose what they trained since their last checkpoint",
        final=f"{options.name} has left the pool",
    )
    return await until_stopped(joined, joined.run(on_ready), log=log, messages=messages)
