"""`resile up`: a pool on this machine, for as long as the command runs."""

import asyncio
import errno
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError
from resile_shared.policies import POLICIES_HELP, PolicyName

from .options import DEFAULT_HOME, print_json
from .stopping import until_stopped

if TYPE_CHECKING:
    from ..pool.home import PoolHome
    from ..pool.services import PoolOptions

app = typer.Typer(rich_markup_mode=None)


@app.command(
    short_help="Run a pool on this machine, until Ctrl-C.",
    epilog="Exit status: 0 drained, 1 failed, 2 asked for what cannot be, 130 ended at once.",
)
def up(
    *,
    hosts: Annotated[int, typer.Option(metavar="H", min=1, max=64, help="How many hosts to act as.")] = 1,
    slots: Annotated[
        int | None,
        typer.Option(metavar="S", min=1, max=256, help="Slots of each host. Default: what this machine has."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="P", min=0, max=65535, help="Port of the API. Default: that of last time, or any.")
    ] = 0,
    home: Annotated[
        Path, typer.Option(metavar="DIR", envvar="RESILE_HOME", help="Folder that keeps all the pool has.")
    ] = DEFAULT_HOME,
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDR", help="Address of the API and the bus; 0.0.0.0 lets other machines in, with the token."
        ),
    ] = "127.0.0.1",
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Keep packages, checkpoints and models there: file://, s3://, gs://, az://"),
    ] = None,
    policy: Annotated[PolicyName, typer.Option(help=f"{POLICIES_HELP}.")] = PolicyName.FAIRSHARE,
    namespaces: Annotated[
        bool,
        typer.Option(
            "--namespaces",
            help="Give each part a network namespace of its own, whose cable can be cut: for testing, needs root.",
        ),
    ] = False,
    open_to_chaos: Annotated[
        bool, typer.Option("--open-to-chaos", help="Let `resile chaos` attack this pool: for testing.")
    ] = False,
    detection_seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, max=3600, help="Silence after which a host or worker is held to be lost."),
    ] = 3.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when ready; everything else goes to stderr.")
    ] = False,
) -> int:
    r"""Run a pool on this machine: bus, registry, scheduler, monitor, and H hosts of S slots.

    \b
    resile up                           one host
    resile up --hosts 2 --slots 4       two hosts of four slots
    resile up --storage s3://bucket/p   checkpoints and models outlive this machine

    What dies is started again. Ctrl-C drains the pool; a second one ends it at once. The next `resile up` in the same
    home carries on with the jobs.
    """
    from ..pool.home import PoolHome
    from ..pool.services import PoolOptions

    if sys.platform != "linux":
        raise UsageError(f"`resile up` needs Linux, and this is {sys.platform}")
    _check_listen(listen, namespaces=namespaces)
    pool_home = PoolHome(home)
    try:
        _check_address(listen, port)
        options = PoolOptions(
            hosts=hosts,
            slots=slots,
            port=port,
            listen=listen,
            storage=storage,
            policy=policy,
            detection_seconds=detection_seconds,
            open_to_chaos=open_to_chaos,
            namespaces=namespaces,
        )
        return asyncio.run(_serve(options, pool_home, as_json=as_json))
    finally:
        pool_home.close()


def _check_listen(listen: str, *, namespaces: bool) -> None:
    try:
        address = ip_address(listen)
    except ValueError:
        raise UsageError(
            f"--listen {listen!r} is no IP address: name one of this machine's, or 0.0.0.0 for all of them"
        ) from None
    if namespaces and not address.is_loopback:
        raise UsageError("--namespaces shuts the pool in, --listen opens it to other machines: leave out one of them")


def _check_address(host: str, port: int) -> None:
    from ..pool.home import listening_fault

    fault = listening_fault(host, port)
    if fault is not None and fault.errno == errno.EADDRINUSE:
        raise UsageError(f"port {port} of {host} is in use: choose another with --port")
    if fault is not None:
        raise UsageError(f"--listen {host} --port {port}: nothing can listen there: {fault.strerror}")


async def _serve(options: "PoolOptions", home: "PoolHome", *, as_json: bool) -> int:
    from ..pool.supervisor import Supervisor

    def tell(text: str) -> None:
        print(text, file=sys.stderr if as_json else sys.stdout, flush=True)

    def greet(url: str) -> None:
        if as_json:
            print_json({"url": url, "home": str(home.path), "pid": os.getpid()})
        else:
            for line in greeting(home, options, url):
                tell(line)

    supervisor = Supervisor(home, options, tell=tell)
    return await until_stopped(supervisor, supervisor.run(greet), tell=tell, last_word="the pool has ended")


def greeting(home: "PoolHome", options: "PoolOptions", url: str) -> list[str]:
    """Return what people are told when the pool is up."""
    from .tables import count

    where = "" if home.path == DEFAULT_HOME.expanduser() else f" --home {home.path}"
    slots = f" of {count(options.slots_per_host, 'slot')}" if options.slots_per_host else ""
    return [
        f"the pool is up at {url}",
        f"  hosts     {options.hosts}{slots}",
        f"  home      {home.path}  (logs/ has a log of each service, pool.json the token)",
        *(_from_elsewhere(home, options, url) if options.is_open else ()),
        f"  submit    resile submit train.py{where}",
        f"  look      resile top{where}",
        "  tenants   are not separated here: everyone on this pool trusts each other",
        "Ctrl-C drains it; the next `resile up` here carries on with its jobs",
    ]


def _from_elsewhere(home: "PoolHome", options: "PoolOptions", url: str) -> list[str]:
    address = f"[{options.reached_at}]" if ":" in options.reached_at else options.reached_at
    there = f"http://{address}:{url.rpartition(':')[2]}"
    storage = home.storage(options.storage)
    limit = [f"            only machines that share {storage} can, unless you choose another --storage"]
    return [
        f"  elsewhere RESILE_SERVER={there}, and the token in {home.token_file} as RESILE_TOKEN",
        f"  join      resile host --join {there} --token $(cat {home.token_file})",
        *(limit if storage.startswith("file:") else ()),
    ]
