"""`resile chaos`: attacks a pool on this machine that was started to be attacked."""

from pathlib import Path
from typing import Annotated

import typer

from resile_shared.errors import UsageError

from ..chaos.attacks import Attack, Kind, What, check, parse
from .options import DEFAULT_HOME, AsJson, Home

_HELP = """Attack a pool on this machine, and see how long it takes to recover.

Only a pool that was started with `resile up --open-to-chaos` can be attacked. What lasts is undone at its end, also
when the command is killed.

\b
resile chaos kill worker job-1             kill -9 one worker of a job, any; `worker job-1/3` names it
resile chaos kill host host-2              an agent with all its workers
resile chaos freeze scheduler              SIGSTOP, and SIGCONT after 5 s
resile chaos slow bus --seconds 20         a process that gets a fifth of its time
resile chaos partition host host-1         cut off from all others: needs `resile up --namespaces`
resile chaos corrupt object-store job-1    damage one of a job's checkpoints
resile chaos campaign --job job-1          random attacks from a seed, and which promises broke
"""
app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, short_help="Attack a pool, and see how it recovers.", help=_HELP
)
TargetArgument = Annotated[What, typer.Argument(metavar="TARGET", help=", ".join(What))]
Name = Annotated[
    str, typer.Argument(metavar="[NAME]", help="The job, the worker as JOB/NUMBER, or the host; services need none.")
]
Seconds = Annotated[float, typer.Option("--seconds", metavar="S", min=0.1, max=3600, help="How long it lasts.")]
ObjectStore = Annotated[
    int | None,
    typer.Option("--object-store-pid", metavar="PID", help="Process of the local server of an s3:// storage."),
]


@app.command(short_help="kill -9: a worker, all of a job, an agent, a host, a service.")
def kill(
    target: TargetArgument,
    name: Name = "",
    *,
    object_store: ObjectStore = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Kill processes with SIGKILL.

    \b
    resile chaos kill worker job-1       any worker of the job
    resile chaos kill worker job-1/3     worker 3
    resile chaos kill job job-1          all workers at once: it starts again from its newest checkpoint
    resile chaos kill agent host-1       the agent; its workers die with it
    resile chaos kill host host-1        the agent and its workers
    resile chaos kill bus                or registry, scheduler, monitor
    """
    return _single(Kind.KILL, target, name, home=home, as_json=as_json, object_store=object_store)


@app.command(short_help="SIGSTOP for some seconds.")
def freeze(
    target: TargetArgument,
    name: Name = "",
    *,
    seconds: Seconds = 5.0,
    object_store: ObjectStore = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Stop processes with SIGSTOP, and let them go on after some seconds.

    \b
    resile chaos freeze worker job-1/3 --seconds 10
    resile chaos freeze host host-1
    """
    return _single(Kind.FREEZE, target, name, seconds=seconds, home=home, as_json=as_json, object_store=object_store)


@app.command(short_help="Let processes run a fifth of the time.")
def slow(
    target: TargetArgument,
    name: Name = "",
    *,
    seconds: Seconds = 10.0,
    object_store: ObjectStore = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Stop processes for 80 ms out of every 100.

    \b
    resile chaos slow worker job-1
    resile chaos slow registry --seconds 30
    """
    return _single(Kind.SLOW, target, name, seconds=seconds, home=home, as_json=as_json, object_store=object_store)


@app.command(short_help="Cut a host or a service off from all others.")
def partition(
    target: TargetArgument,
    name: Name = "",
    *,
    seconds: Seconds = 10.0,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Pull the network cable of a host or a service, without a word to anybody. Needs `resile up --namespaces`.

    \b
    resile chaos partition host host-1 --seconds 20
    """
    return _single(Kind.PARTITION, target, name, seconds=seconds, home=home, as_json=as_json)


@app.command("slow-link", short_help="Limit the bandwidth of a host or a service.")
def slow_link(
    target: TargetArgument,
    name: Name = "",
    *,
    seconds: Seconds = 10.0,
    rate: Annotated[str, typer.Option(metavar="RATE", help="Bandwidth, as `tc` has it.")] = "5mbit",
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Let a host or a service send no more than RATE. Needs `resile up --namespaces`.

    \b
    resile chaos slow-link host host-1 --rate 1mbit
    """
    return _single(Kind.SLOW_LINK, target, name, seconds=seconds, rate=rate, home=home, as_json=as_json)


@app.command("disk-full", short_help="Fill the disk of the pool's storage.")
def disk_full(
    target: TargetArgument,
    name: Name = "",
    *,
    seconds: Seconds = 10.0,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Take all space of the pool's storage, which has to be a folder on a file system of its own.

    \b
    resile chaos disk-full object-store           wait until the disk has room again
    resile chaos disk-full object-store job-1     and until that job has stored a checkpoint
    """
    return _single(Kind.DISK_FULL, target, name, seconds=seconds, home=home, as_json=as_json)


@app.command(short_help="Damage a checkpoint of a job.")
def corrupt(target: TargetArgument, name: Name = "", *, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> int:
    r"""Flip a bit in a part of one of a job's checkpoints, or cut it short; another one that is sound is left.

    \b
    resile chaos corrupt object-store job-1
    """
    if not name:
        raise UsageError("name the job whose checkpoint it shall be: `corrupt object-store job-1`")
    return _single(Kind.CORRUPT, target, name, home=home, as_json=as_json)


@app.command(
    short_help="Random attacks from a seed, and which promises broke.",
    epilog="Exit status: 0 all promises held, 1 one broke, 2 asked for what cannot be.",
)
def campaign(
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script of --own-pool, after `--`.")
    ] = None,
    *,
    job: Annotated[str | None, typer.Option(metavar="ID", help="The job that is watched, by id or name.")] = None,
    own_pool: Annotated[
        Path | None, typer.Option(metavar="SCRIPT", help="Start a pool for this, and submit SCRIPT to it.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed chooses the same attacks.")] = 0,
    minutes: Annotated[float, typer.Option(metavar="M", min=0.1, help="How long to attack.")] = 10.0,
    sha256: Annotated[
        str | None,
        typer.Option(metavar="SHA", help="What its parameters have to be. Default: trains it undisturbed, at the end."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, max=16, help="How often SCRIPT is submitted: jobs share the own pool.")
    ] = 2,
    hosts: Annotated[int, typer.Option(metavar="H", min=1, max=64, help="Hosts of the own pool.")] = 3,
    slots: Annotated[int, typer.Option(metavar="S", min=1, max=256, help="Slots of each of them.")] = 2,
    object_store: ObjectStore = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Attack a pool at random while it trains a job, and say which of its promises broke.

    \b
    resile chaos campaign --own-pool train.py --minutes 10            a pool for this, which goes again
    resile chaos campaign --job job-1 --seed 7                        a pool that is up, and one of its jobs
    resile chaos campaign --own-pool train.py --seed 7 -- --epochs 50

    A job that completes is submitted again. The verdict: the parameters are those of an undisturbed run, every
    sample was used once, no slot was held twice, each job has one lineage, none was lost, histories and events have no
    gap and nothing twice, and the pool recovered from every attack. As root the own pool has its hosts in network
    namespaces and its storage on a file system of its own, so that links can be cut and the disk can be full.
    """
    from . import attacking

    if (job is None) == (own_pool is None):
        raise UsageError("name a job with --job, or a script with --own-pool")
    if args and own_pool is None:
        raise UsageError("arguments are for the script of --own-pool; a job has its own")
    orders = attacking.Orders(seed=seed, minutes=minutes, sha256=sha256, object_store=object_store, as_json=as_json)
    if own_pool is not None:
        return attacking.campaign_on_own_pool(own_pool, tuple(args or ()), orders, jobs=jobs, hosts=hosts, slots=slots)
    assert job is not None
    return attacking.campaign(home, job, orders)


def _single(
    kind: Kind,
    what: What,
    name: str,
    *,
    home: Path,
    as_json: bool,
    seconds: float = 0.0,
    rate: str = "",
    object_store: int | None = None,
) -> int:
    check(kind, what)
    target = parse(what, name)
    from . import attacking

    attack = Attack(kind, target, seconds=seconds, rate=rate)
    return attacking.attack_once(home, attack, object_store=object_store, as_json=as_json)
