"""The command that starts a service."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from resile_shared.errors import UsageError
from resile_shared.text import printable

from .options import (
    DEFAULT_HOME,
    AsJson,
    Data,
    Home,
    IdempotencyKey,
    Mounts,
    Requirements,
    Server,
    With,
    environment,
    naming_flags,
    reach,
    required,
    show,
)

if TYPE_CHECKING:
    from ..job_options import JobOptions

app = typer.Typer(rich_markup_mode=None)


@app.command(short_help="Serve a Python class: a pool of replicas that answer requests.")
def serve(
    target: Annotated[str, typer.Argument(metavar="FILE:CLASS", help="The class, and the Python file that has it.")],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script (sys.argv), after `--`.")
    ] = None,
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the service. Default: the name of the file.")
    ] = None,
    min_replicas: Annotated[
        int, typer.Option("--min-replicas", metavar="N", help="Minimum number of replicas. Default: 1.")
    ] = 1,
    max_replicas: Annotated[
        int, typer.Option("--max-replicas", metavar="N", help="Maximum number of replicas. Default: 1.")
    ] = 1,
    concurrency: Annotated[
        int, typer.Option(metavar="N", help="Requests that a replica computes at the same time. Default: 1.")
    ] = 1,
    in_flight: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Requests that a replica should have on average: with more, there are more replicas. "
            "Default: twice the concurrency.",
        ),
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="A higher priority means a larger share. Default: 5000.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Tenant that the service belongs to.")] = None,
    group: Annotated[
        str, typer.Option(metavar="LABELS", help="Use only hosts with these labels: gpu=h200,zone=a")
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K[=V]", help="Set an environment variable in the replicas. May be repeated."),
    ] = None,
    packages: With = None,
    requirements: Requirements = None,
    data: Data = None,
    mounts: Mounts = None,
    idempotency_key: IdempotencyKey = None,
    server: Server = None,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Serve a class of a Python file, and print the id of the job whose workers are its replicas.

    \b
    resile serve classify.py:Classifier                     one replica
    resile serve classify.py:Classifier --max-replicas 4    up to four, as many as its requests need
    resile stop classify                                    end it

    Each replica makes one object, and its methods answer requests: resile.remote("classify").predict(x) in Python,
    POST /v1/services/classify/predict over HTTP. docs/serving.md says how. The file is uploaded as by `resile submit`.
    """
    from ..job_options import pack_job

    path, class_name = _class_of(target)
    if max_replicas < min_replicas:
        raise UsageError(f"--max-replicas {max_replicas} is below --min-replicas {min_replicas}: raise it")
    options = {
        "name": name,
        "env": environment(env),
        "requirements": required(packages, requirements),
        "data": data,
        "mounts": tuple(str(Path(mount).absolute()) for mount in mounts or ()),
        "min_workers": min_replicas,
        "max_workers": max_replicas,
        "service": {"class_name": class_name, "concurrency": concurrency, "in_flight": in_flight},
        "priority": priority,
        "tenant": tenant,
        "group": group,
    }
    given = cast("JobOptions", {option: value for option, value in options.items() if value is not None})
    with naming_flags():
        job = pack_job(path, args or (), **given)
    if warning := job.package.warning:
        typer.echo(printable(warning), err=True)
    submitted = reach(
        lambda client: client.submit_packed(job), server=server, home=home, idempotency_key=idempotency_key
    )
    if submitted.warning:
        typer.echo(f"{submitted.id} is {submitted.warning}", err=True)
    show({"id": submitted.id}, [submitted.id], as_json=as_json)


def _class_of(target: str) -> tuple[Path, str]:
    """Return the file and the class that ``target`` names. Raises UsageError."""
    file, _, class_name = target.rpartition(":")
    path = Path(file)
    if not file or not class_name:
        raise UsageError(f"{target}: name a file and its class, as in `resile serve classify.py:Classifier`")
    try:
        tree = ast.parse(path.read_bytes(), filename=file)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{file} is not Python: {error}") from error
    found = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if class_name not in found:
        has = f"its classes are {', '.join(found)}" if found else "it has no class"
        raise UsageError(f"{file} has no class {class_name}: {has}")
    return path, class_name
