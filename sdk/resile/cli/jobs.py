"""The commands that submit, show and change jobs."""

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from resile_shared.errors import UsageError
from resile_shared.text import printable

from .options import (
    DEFAULT_HOME,
    Answer,
    AnyJob,
    AsJson,
    Compat,
    Data,
    Home,
    IdempotencyKey,
    Job,
    Mounts,
    Requirements,
    Server,
    With,
    environment,
    naming_flags,
    pool_command,
    reach,
    required,
    show,
)

if TYPE_CHECKING:
    from ..client import AsyncClient
    from ..job_options import JobOptions, PackedJob
    from ..package import Package

app = typer.Typer(rich_markup_mode=None)
_FROM_NOW = re.compile(r"([0-9]{1,5})([mhd])")


@app.command(short_help="Submit a script or a folder as a job; print its id.")
def submit(
    path: Annotated[
        Path, typer.Argument(metavar="SCRIPT_OR_DIR", help="The training script, or a folder that contains it.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script, after `--`.")
    ] = None,
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the job. Default: the name of the script or folder.")
    ] = None,
    max_workers: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of workers. Default: no limit.")
    ] = None,
    min_workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Minimum number of workers: wait until this many slots are free. Default: 1."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Only these numbers of workers: 1,2,4,8. Default: any.")
    ] = None,
    gang: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Run a script that knows nothing of Resile on N slots at once, as torchrun would: with RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Its results are not guaranteed to be bit-identical.",
        ),
    ] = None,
    restartable: Annotated[
        bool,
        typer.Option(
            "--restartable",
            help="The gang may be ended and started again: its script saves, and finds, what it needs.",
        ),
    ] = False,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it should be complete: in 2h, 90m or 3d, or at 2026-01-02T18:00."),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="A higher priority means a larger share. Default: 5000.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Tenant that the job belongs to.")] = None,
    group: Annotated[
        str, typer.Option(metavar="LABELS", help="Use only hosts with these labels: gpu=h200,zone=a")
    ] = "",
    placement: Annotated[
        str,
        typer.Option(
            metavar="pack|spread", help="pack: use as few hosts as possible, near each other; spread: use many."
        ),
    ] = "pack",
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K[=V]",
            help="Set an environment variable in the workers; without a value, to that of this environment, so that "
            "a secret is not in the command line. May be repeated.",
        ),
    ] = None,
    packages: With = None,
    requirements: Requirements = None,
    data: Data = None,
    mounts: Mounts = None,
    compat: Compat = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="First try a few iterations here, as `resile check`; submit if it trains."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be uploaded, with sizes, and submit nothing.")
    ] = False,
    idempotency_key: IdempotencyKey = None,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Submit a script or a folder to the pool as a job, and print its id.

    Once the id is printed, the job is stored and cannot be lost.

    \b
    resile submit train.py                                 as many workers as are free
    resile submit train.py --max-workers 4 -- --lr 0.1     at most four; --lr is the script's own option
    resile submit train.py --sizes 1,2,4,8                 one, two, four or eight workers
    resile submit train.py --with 'einops>=0.8'            with a package that the pool does not have
    resile submit train.py --data mnist                    with data that is registered: `resile dataset`
    resile submit elastic-main.py --compat ibm-edt         a script for IBM Elastic Distributed Training
    resile submit --gang 4 -- train_ddp.py --lr 0.1        four processes of a script for torchrun
    resile submit train.py --check                         tried here before it is submitted
    resile submit train.py --dry-run                       list what would be uploaded
    resile submit project/ --priority 8000                 a folder with train.py, main.py or one *.py
    resile wait $(resile submit train.py)                  submit, and wait until it ends

    A folder is uploaded whole. A script is uploaded with the Python files, packages (folders with an __init__.py) and
    files of up to 1 MB beside and below it. A script in a home directory is uploaded alone. Hidden files, files that
    usually hold secrets (keys, tokens, passwords), what a .gitignore names, homes of Resile, virtual environments, and
    links to folders outside are not uploaded. One line lists what is left out, except for caches and files that match
    .resileignore; a pattern with a ! there, such as !public.pem, asks for a file. The limit is 50 MB and 5000 files:
    register data with `resile dataset`.
    """
    from ..job_options import pack_job

    options = {
        "name": name,
        "env": environment(env),
        "compat": compat,
        "requirements": required(packages, requirements),
        "data": data,
        "mounts": tuple(str(Path(mount).absolute()) for mount in mounts or ()),
        "min_workers": min_workers,
        "max_workers": max_workers,
        "sizes": _numbers(sizes),
        "gang": gang,
        "restartable": restartable,
        "deadline": _time(deadline),
        "priority": priority,
        "tenant": tenant,
        "group": group,
        "placement": placement,
    }
    given = cast("JobOptions", {option: value for option, value in options.items() if value is not None})
    with naming_flags():
        job = pack_job(path, args or (), **given)
    if dry_run:
        show(_contents(job.package), _listing(job.package), as_json=as_json)
        return
    if warning := job.package.warning:
        typer.echo(printable(warning), err=True)
    if check:
        _check(job, path)

    submitted = reach(
        lambda client: client.submit_packed(job), server=server, home=home, idempotency_key=idempotency_key
    )
    if submitted.warning:
        typer.echo(f"{submitted.id} is {submitted.warning}", err=True)
    show({"id": submitted.id}, [submitted.id], as_json=as_json)


def _contents(package: "Package") -> dict[str, object]:
    files = [{"name": name, "bytes": num_bytes} for name, num_bytes in package.files.items()]
    return {"script": package.script, "files": files, "left_out": package.left_out, "upload": len(package.content)}


def _listing(package: "Package") -> list[str]:
    from .tables import count

    sizes = [(f"{num_bytes:,}", name) for name, num_bytes in sorted(package.files.items())]
    width = max(len(size) for size, _ in sizes)
    total = f"{count(len(sizes), 'file')} with {count(sum(package.files.values()), 'byte')} would be uploaded as "
    return [
        *(f"{size:>{width}}  {name}" for size, name in sizes),
        f"{total}a package of {len(package.content):,} bytes; the script is {package.script}",
        *(f"not sent: {each}" for each in package.left_out),
    ]


def _check(job: "PackedJob", path: Path) -> None:
    """Try the script of a job on this machine, and print the report. Raises UsageError for one that cannot train."""
    from .check import DEFAULT_ITERATIONS, try_script

    fields = job.fields
    if elsewhere := [option for option in ("gang", "data", "mounts") if fields.get(option)]:
        raise UsageError(f"--check tries the script on this machine, without --{elsewhere[0]}: leave one of both out")
    script = path / job.package.script if path.is_dir() else path
    report = try_script(
        script,
        cast("tuple[str, ...]", fields["args"]),
        iterations=DEFAULT_ITERATIONS,
        env=cast("dict[str, str]", fields["env"]),
        requirements=cast("tuple[str, ...]", fields["requirements"]),
    )
    for line in report.lines():
        typer.echo(line, err=True)
    if report.error:
        raise UsageError("not submitted: the script cannot train; see above")


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return tuple(int(number) for number in text.split(",")) if text else None
    except ValueError as error:
        raise UsageError(f"--sizes: {text} is not a list of whole numbers: use a form such as 1,2,4,8") from error


def _time(text: str | None) -> datetime | None:
    """Parse a time from now, or one of day."""
    if text is None:
        return None
    if match := _FROM_NOW.fullmatch(text):
        return datetime.now() + timedelta(minutes=int(match[1]) * {"m": 1, "h": 60, "d": 1440}[match[2]])
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(
            f"--deadline: {text} is not a time: use a form such as 90m, 2h, 3d or 2026-01-02T18:00"
        ) from error


@pool_command(app, "jobs", short_help="List all jobs.")
async def list_jobs(client: "AsyncClient") -> Answer:
    """List all jobs, in the order of their submission."""
    from .tables import job_table

    jobs = await client.jobs()
    lines = job_table(jobs) if jobs else ["there are no jobs: submit one with `resile submit train.py`"]
    return {"jobs": jobs}, lines


@pool_command(app, "job", short_help="Show one job and its history.")
async def show_job(client: "AsyncClient", job: AnyJob) -> Answer:
    """Show one job: its progress, its slots, and its history."""
    from .tables import job_details

    view = await client.whole_job(await client.find(job, newest=True))
    return view, job_details(view)


@pool_command(app, short_help="Change the priority of a job.", is_keyed=True)
async def priority(
    client: "AsyncClient",
    job: Job,
    number: Annotated[int, typer.Argument(metavar="N", help="The new priority, 1 to 1000000; by default it is 5000.")],
) -> Answer:
    r"""Change the priority of a job, and so its share of the pool.

    Shares are proportional to priorities: two jobs with 5000 and 10000 share 9 slots as 3 and 6.
    """
    found = await client.find(job)
    await client.set_priority(found, number)
    return {"id": found}, [f"{found} has priority {number}"]


@pool_command(app, short_help="Stop a job permanently.", is_keyed=True)
async def stop(
    client: "AsyncClient",
    job: Job,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Recorded in the job's history.")] = "",
) -> Answer:
    """Stop a job permanently; its slots go to other jobs."""
    found = await client.find(job)
    await client.stop(found, reason=reason)
    return {"id": found}, [f"{found} is stopping"]


@pool_command(app, short_help="Save a checkpoint of a job, and release its slots.", is_keyed=True)
async def pause(client: "AsyncClient", job: Job) -> Answer:
    """Save a checkpoint of a job and release its slots, until `resile resume`."""
    found = await client.find(job)
    await client.pause(found)
    return {"id": found}, [f"{found} is pausing"]


@pool_command(app, short_help="Resume a paused job.", is_keyed=True)
async def resume(client: "AsyncClient", job: Job) -> Answer:
    """Resume a paused job from its checkpoint, as soon as slots are free."""
    found = await client.find(job)
    await client.resume(found)
    return {"id": found}, [f"{found} is resuming"]


@pool_command(app, short_help="Remove a job that has ended, with all its files.", is_keyed=True)
async def delete(client: "AsyncClient", job: Job) -> Answer:
    """Remove a job that has ended: its history, logs, checkpoints, model and output."""
    found = await client.find(job)
    await client.delete(found)
    return {"id": found}, [f"{found} is deleted"]
