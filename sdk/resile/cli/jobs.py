"""The commands that submit, show and change jobs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.errors import UsageError

from .options import DEFAULT_HOME, AsJson, Home, Job, Server, print_json, print_lines, reach, variable

if TYPE_CHECKING:
    from resile_shared.api import JobSummary, JobView
    from resile_shared.messages.jobs import JobSpec

    from ..client import Client

app = typer.Typer(rich_markup_mode=None)


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
        int, typer.Option(metavar="N", help="Minimum number of workers: wait until so many slots are free.")
    ] = 1,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="A higher priority means a larger share. Default: 5000.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Tenant that the job belongs to.")] = None,
    group: Annotated[str, typer.Option(metavar="LABELS", help="Only hosts with these labels: gpu=h200,zone=a")] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", help="Set an environment variable in the workers; may be repeated."),
    ] = None,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Submit a script or a folder to the pool as a job, and print its id.

    The job is stored when the id is printed, and is not lost whatever fails afterwards.

    \b
    resile submit train.py                                 as many workers as are free
    resile submit train.py --max-workers 4 -- --lr 0.1     at most four; --lr is the script's own option
    resile submit project/ --priority 8000                 a folder with train.py, main.py or one *.py
    resile wait $(resile submit train.py)                  submit, and wait until it ends

    A folder is uploaded whole. With a script go the Python files and files of up to 1 MB beside it, and the packages
    (folders with an __init__.py) below its folder; a script in a home directory is uploaded alone. Hidden files,
    virtual environments and links to folders are not uploaded. The limit is 50 MB and 5000 files: keep data elsewhere.
    """
    from ..package import pack

    package = pack(path)
    fields = {
        "name": name or (path.resolve().name if path.is_dir() else path.stem),
        "script": package.script,
        "args": tuple(args or ()),
        "env": dict(variable(text) for text in env or ()),
        "min_workers": min_workers,
        "group": group,
        **{
            key: value
            for key, value in {"max_workers": max_workers, "priority": priority, "tenant": tenant}.items()
            if value is not None
        },
    }
    _spec({**fields, "package": "validated before the upload"})

    async def work(client: "Client") -> str:
        return await client.submit(_spec({**fields, "package": await client.upload(package.content)}))

    job = reach(work, server=server, home=home, as_json=as_json)
    if as_json:
        print_json({"id": job})
    else:
        typer.echo(job)


def _spec(fields: dict[str, object]) -> "JobSpec":
    from pydantic import ValidationError

    from resile_shared.messages.jobs import JobSpec

    try:
        return JobSpec.model_validate(fields)
    except ValidationError as error:
        faults = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors()]
        messages = [f"--{name.replace('_', '-')}: {message}" if name else message for name, message in faults]
        raise UsageError("; ".join(text.replace("Value error, ", "") for text in messages)) from error


@app.command("jobs", short_help="List all jobs.")
def list_jobs(*, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """List all jobs, in the order of their submission."""
    from .tables import job_table

    async def work(client: "Client") -> "tuple[JobSummary, ...]":
        return await client.jobs()

    jobs = reach(work, server=server, home=home, as_json=as_json)
    if as_json:
        print_json({"jobs": jobs})
    else:
        print_lines(job_table(jobs) if jobs else ["there are no jobs: submit one with `resile submit train.py`"])


@app.command("job", short_help="Show one job and its history.")
def show_job(job: Job, *, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Show one job: its progress, its slots, and its history."""
    from .tables import job_details

    async def work(client: "Client") -> "JobView":
        return await client.job(await client.find(job))

    view = reach(work, server=server, home=home, as_json=as_json)
    if as_json:
        print_json(view)
    else:
        print_lines(job_details(view))


@app.command(short_help="Change the priority of a job.")
def priority(
    job: Job,
    number: Annotated[int, typer.Argument(metavar="N", help="The new priority; the default of jobs is 5000.")],
    *,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Change the priority of a job, and so its share of the pool.

    Shares are proportional to priorities: two jobs with 5000 and 10000 share 9 slots as 3 and 6.
    """

    async def work(client: "Client") -> str:
        found = await client.find(job)
        await client.set_priority(found, number)
        return found

    _confirm(reach(work, server=server, home=home, as_json=as_json), f"has priority {number}", as_json=as_json)


@app.command(short_help="Stop a job for good.")
def stop(
    job: Job,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Recorded in the job's history.")] = "",
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    """Stop a job for good; its slots go to other jobs."""

    async def work(client: "Client") -> str:
        found = await client.find(job)
        await client.stop(found, reason=reason)
        return found

    _confirm(reach(work, server=server, home=home, as_json=as_json), "is stopping", as_json=as_json)


@app.command(short_help="Save a checkpoint of a job, and release its slots.")
def pause(job: Job, *, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Save a checkpoint of a job and release its slots, until `resile resume`."""

    async def work(client: "Client") -> str:
        found = await client.find(job)
        await client.pause(found)
        return found

    _confirm(reach(work, server=server, home=home, as_json=as_json), "is pausing", as_json=as_json)


@app.command(short_help="Resume a paused job.")
def resume(job: Job, *, server: Server = None, home: Home = DEFAULT_HOME, as_json: AsJson = False) -> None:
    """Resume a paused job from its checkpoint, as soon as slots are free."""

    async def work(client: "Client") -> str:
        found = await client.find(job)
        await client.resume(found)
        return found

    _confirm(reach(work, server=server, home=home, as_json=as_json), "is resuming", as_json=as_json)


def _confirm(job: str, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"id": job})
    else:
        typer.echo(f"{job} {what}")
