"""`resile up`: runs a pool on this machine."""

import asyncio
import errno
import os
import shlex
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError
from resile_shared.policies import POLICIES_HELP, PolicyName

from .options import DEFAULT_DATA_CACHE, DEFAULT_HOME, DataCache, logger_beside, show
from .stopping import StopMessages, until_stopped

if TYPE_CHECKING:
    from ..pool.home import PoolHome
    from ..pool.services import PoolOptions

app = typer.Typer(rich_markup_mode=None)


@app.command(
    short_help="Run a pool on this machine, until Ctrl-C.",
    epilog="Exit status: 0 all jobs saved, 1 failed, or a job not saved, 2 invalid arguments, 130/143 stopped at once.",
)
def up(
    *,
    hosts: Annotated[int, typer.Option(metavar="H", min=1, max=64, help="Number of hosts to run.")] = 1,
    slots: Annotated[
        int | None,
        typer.Option(metavar="S", min=1, max=256, help="Slots of each host. Default: as many as this machine has."),
    ] = None,
    port: Annotated[
        int,
        typer.Option(metavar="P", min=0, max=65535, help="Port of the API. Default: the last one, or any free one."),
    ] = 0,
    home: Annotated[
        Path, typer.Option(metavar="DIR", envvar="RESILE_HOME", help="Home folder of the pool.")
    ] = DEFAULT_HOME,
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDR",
            help="IP address of the API and the bus; 0.0.0.0 opens them to other machines, with the token.",
        ),
    ] = "127.0.0.1",
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Storage for packages, checkpoints and models: file://, s3://, gs://, az://"),
    ] = None,
    data_cache: DataCache = DEFAULT_DATA_CACHE,
    policy: Annotated[
        PolicyName | None,
        typer.Option(help=f"{POLICIES_HELP}. Default: the last choice, initially fairshare.", show_default=False),
    ] = None,
    preemption: Annotated[
        bool | None,
        typer.Option(
            "--preemption/--no-preemption",
            help="Whether a job may lose slots to another one. Default: the last choice, initially yes.",
            show_default=False,
        ),
    ] = None,
    namespaces: Annotated[
        bool,
        typer.Option(
            "--namespaces",
            help="Run each service and host in its own network namespace, for tests that cut links. Requires root.",
        ),
    ] = False,
    open_to_chaos: Annotated[
        bool, typer.Option("--open-to-chaos", help="Let `resile chaos` attack this pool. For tests.")
    ] = False,
    detection_seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, max=3600, help="Seconds of silence after which a host or worker is lost."),
    ] = 3.0,
    grace_seconds: Annotated[
        float,
        typer.Option(metavar="S", min=1, max=86400, help="Seconds that Ctrl-C gives jobs to save a checkpoint."),
    ] = 120.0,
    keep_jobs: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            max=100_000,
            help="Keep the newest N jobs that have ended; of older ones, keep only models and output.",
        ),
    ] = 1000,
    keep_days: Annotated[
        float,
        typer.Option(metavar="D", min=0.001, max=36500, help="Keep jobs that have ended, and hosts that left, D days."),
    ] = 90.0,
    trace_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="RESILE_TRACE_URL",
            help="Where a collector shows a trace, such as http://127.0.0.1:16686/trace/{trace}: the page links there.",
        ),
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object when ready; everything else goes to stderr.")
    ] = False,
) -> int:
    r"""Run a pool on this machine: bus, registry, scheduler, monitor, and H hosts of S slots.

    \b
    resile up                           one host
    resile up --hosts 2 --slots 4       two hosts of four slots
    resile up --storage s3://bucket/p   checkpoints and models outlive this machine

    `resile up` restarts services that exit. Ctrl-C or SIGTERM saves a checkpoint of every job, then stops the pool; a
    second one stops it at once. The next `resile up` in the same home continues with the jobs.
    """
    from ..pool.home import PoolHome
    from ..pool.services import PoolOptions

    if sys.platform != "linux":
        raise UsageError(f"`resile up` requires Linux; this machine runs {sys.platform}")
    _check_listen(listen, namespaces=namespaces)
    pool_home = PoolHome(home)
    try:
        _check_address(listen, port)
        options = PoolOptions(
            hosts=hosts,
            slots=slots,
            data_cache_bytes=int(data_cache * 1e9),
            port=port,
            listen=listen,
            storage=storage,
            policy=policy,
            preemption=preemption,
            detection_seconds=detection_seconds,
            grace_seconds=grace_seconds,
            keep_jobs=keep_jobs,
            keep_days=keep_days,
            trace_url=trace_url,
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
            f"--listen {listen!r} is not an IP address: use one of this machine, or 0.0.0.0 for all"
        ) from None
    if namespaces and not address.is_loopback:
        raise UsageError("--namespaces isolates the pool, but --listen opens it to other machines: omit one of them")


def _check_address(host: str, port: int) -> None:
    from ..pool.home import check_loopback, listening_fault

    check_loopback()
    fault = listening_fault(host, port)
    if fault is not None and fault.errno == errno.EADDRINUSE:
        raise UsageError(f"port {port} of {host} is in use: choose another with --port")
    if fault is not None:
        raise UsageError(
            f"cannot listen on --listen {host} --port {port}: {fault.strerror}: choose another address or port"
        )


async def _serve(options: "PoolOptions", home: "PoolHome", *, as_json: bool) -> int:
    from ..pool.supervisor import Supervisor

    def on_ready(url: str) -> None:
        document = {"url": url, "home": str(home.path), "pid": os.getpid()}
        show(document, ready_lines(home, options, url), as_json=as_json)

    log = logger_beside(as_json=as_json)
    supervisor = Supervisor(home, options, log=log)
    messages = StopMessages(
        first="stopping: all jobs are saved first; press Ctrl-C again to stop at once",
        second="stopping at once: jobs that are not saved yet lose what they trained since their last checkpoint",
        final="the pool has stopped",
    )
    return await until_stopped(supervisor, supervisor.run(on_ready), log=log, messages=messages)


def ready_lines(home: "PoolHome", options: "PoolOptions", url: str) -> list[str]:
    """Return the lines that `resile up` prints when the pool is ready."""
    from .tables import count

    where = "" if home.path == DEFAULT_HOME.expanduser() else f" --home {shlex.quote(str(home.path))}"
    slots = f" of {count(options.slots_per_host, 'slot')}" if options.slots_per_host else ""
    return [
        f"the pool is up at {url}",
        f"  hosts     {options.hosts}{slots}",
        f"  home      {home.path}  (logs/: one log per service; pool.json: the token)",
        *(_for_other_machines(home, options, url) if options.is_open else ()),
        f"  submit    resile submit train.py{where}",
        f"  watch     resile top{where}, or the page: resile page{where}",
        "  security  submitted code runs as this user: let in only people you trust",
        "press Ctrl-C to save all jobs and stop it; the next `resile up` in this home continues with the jobs",
    ]


def _for_other_machines(home: "PoolHome", options: "PoolOptions", url: str) -> list[str]:
    address = f"[{options.reached_at}]" if ":" in options.reached_at else options.reached_at
    there = f"http://{address}:{url.rpartition(':')[2]}"
    storage = home.storage(options.storage)
    limit = [f"            only from machines that share {storage}; otherwise choose another --storage"]
    return [
        f"  remote    RESILE_SERVER={there}, RESILE_TOKEN=the token in {home.token_file}",
        f"  join      resile host --join {there} --token-file token    (a copy of {home.token_file})",
        *(limit if storage.startswith("file:") else ()),
    ]
