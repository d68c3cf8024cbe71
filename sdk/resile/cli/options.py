"""What many commands share: their options, and the connection to the pool."""

import asyncio
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from resile_shared.errors import UsageError
from resile_shared.text import printable

from .lenient import LenientStream

if TYPE_CHECKING:
    from ..client import AsyncClient

T = TypeVar("T")
Answer = tuple[object, Iterable[str]]
"""What a command shows: a JSON document, and lines of text."""

_MAY_BE_OPTION = re.compile(r"^\w+|\w+_\w+")
"""What an error may call an option: its first word, and those that no text has."""
_FLAGS = {"mounts": "--mount", "requirements": "--with"}
"""The flags that are not named as what they give."""
DEFAULT_HOME = Path("~/.resile")
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        envvar="RESILE_SERVER",
        help="URL of the pool; its token is read from RESILE_TOKEN. Default: the pool in the home folder.",
    ),
]
Home = Annotated[
    Path,
    typer.Option("--home", metavar="DIR", envvar="RESILE_HOME", help="Home folder of a pool on this machine."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
With = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="PACKAGE",
        help="Install a package for the workers, as for pip: 'einops>=0.8'. Each host builds the environment once; "
        "torch and resile stay those of the pool. May be repeated.",
    ),
]
Requirements = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Install the packages of a requirements.txt or a pyproject.toml for the workers."
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="NAME",
        help="Fetch a dataset to the hosts (`resile dataset add`); scripts find it with "
        'resile.training.dataset("NAME"). May be repeated.',
    ),
]
Mounts = Annotated[
    list[str] | None,
    typer.Option("--mount", metavar="PATH", help="Use only hosts on which this path exists. May be repeated."),
]
DEFAULT_DATA_CACHE = 200.0
DataCache = Annotated[
    float, typer.Option(metavar="GB", min=0, max=1e6, help="Disk space for fetched datasets on each host.")
]
Compat = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Run a script for another platform unchanged: ibm-edt (IBM Elastic Distributed Training).",
    ),
]
Job = Annotated[
    str, typer.Argument(metavar="ID", help="The job, by id, by name if the name is unique, or the newest: NAME@latest.")
]
AnyJob = Annotated[
    str, typer.Argument(metavar="ID", help="The job, by id, or by name: the newest of several, as with NAME@latest.")
]
IdempotencyKey = Annotated[
    str | None,
    typer.Option(
        "--idempotency-key",
        metavar="KEY",
        help="A command that is repeated with the same key takes effect once. Default: a new key.",
    ),
]


def reach(
    work: Callable[["AsyncClient"], Awaitable[T]],
    *,
    server: str | None,
    home: Path,
    idempotency_key: str | None = None,
) -> T:
    """Do ``work`` with a client of the pool; it sends at most one command if it has an ``idempotency_key``."""
    from ..client import AsyncClient, find_server

    async def connected() -> T:
        async with AsyncClient(find_server(server, home=home), idempotency_key=idempotency_key) as client:
            return await work(client)

    return asyncio.run(connected())


def pool_command(
    app: typer.Typer, name: str | None = None, *, short_help: str, is_keyed: bool = False
) -> Callable[[Callable[..., Awaitable["Answer"]]], None]:
    """Add a command to ``app``: ``work`` is called with a client of the pool and with its own options.

    It returns a JSON document and lines of text, of which ``--json`` selects one. ``--server``, ``--home`` and
    ``--json`` are added to its options, and ``--idempotency-key`` if it ``is_keyed``, as what changes something is.
    """

    def register(work: Callable[..., Awaitable[Answer]]) -> None:
        def command(
            *,
            idempotency_key: IdempotencyKey = None,
            server: Server = None,
            home: Home = DEFAULT_HOME,
            as_json: AsJson = False,
            **own: Any,
        ) -> None:
            def of(client: "AsyncClient") -> Awaitable[Answer]:
                return work(client, **own)

            document, lines = reach(of, server=server, home=home, idempotency_key=idempotency_key)
            show(document, lines, as_json=as_json)

        _, *options = inspect.signature(work).parameters.values()
        key, *shared, _ = inspect.signature(command).parameters.values()
        shared = [key, *shared] if is_keyed else shared
        command.__signature__ = inspect.Signature([*options, *shared])  # type: ignore[attr-defined]
        command.__name__, command.__doc__ = work.__name__, work.__doc__
        app.command(name, short_help=short_help)(command)

    return register


def print_json(document: object) -> None:
    """Print API views, or a document that contains them, as one line of JSON."""
    import orjson
    from pydantic_core import to_jsonable_python

    typer.echo(orjson.dumps(to_jsonable_python(document)))


def show(document: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print ``document`` with ``as_json``, else ``lines``."""
    if as_json:
        print_json(document)
    else:
        for line in lines:
            typer.echo(printable(line))


def logger_beside(*, as_json: bool) -> Callable[[str], None]:
    """Return a function that prints a line at once; with ``as_json``, stdout belongs to the JSON.

    It never raises: a supervisor goes on if nobody reads its output, or if the disk that holds it is full.
    """

    def log(text: str) -> None:
        print(printable(text), file=LenientStream(sys.stderr if as_json else sys.stdout), flush=True)

    return log


def required(packages: Iterable[str] | None, file: Path | None) -> tuple[str, ...]:
    """Return the requirements that `--with` and `--requirements` name. Raises UsageError."""
    from resile_shared.requirements import parse_requirements, read_requirements

    try:
        named = parse_requirements(packages or ())
    except ValueError as error:
        raise UsageError(f"--with: {error}") from error
    return parse_requirements((*named, *(read_requirements(file) if file else ())))


def environment(env: Iterable[str] | None) -> dict[str, str]:
    """Return the variables of workers that `--env` names. Raises UsageError."""
    return dict(variable(text) for text in env or ())


@contextmanager
def naming_flags() -> Iterator[None]:
    """Raise errors about options of a job with the flags that give them, as --max-workers for max_workers."""
    from ..job_options import InvalidOptions

    try:
        yield
    except InvalidOptions as error:
        raise UsageError("; ".join(map(_with_flags, error.faults))) from error


def _with_flags(fault: str) -> str:
    from ..job_options import JobOptions

    names = JobOptions.__annotations__

    def flag(found: re.Match[str]) -> str:
        name = found[0]
        return _FLAGS.get(name, f"--{name.replace('_', '-')}") if name in names else name

    return _MAY_BE_OPTION.sub(flag, fault)


def variable(text: str) -> tuple[str, str]:
    """Parse ``NAME=VALUE``, or ``NAME`` for the value in this environment. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not name:
        raise UsageError(f"--env {text!r}: must have the form NAME=VALUE, or NAME")
    if not equals:
        if name not in os.environ:
            raise UsageError(f"--env {name}: there is no variable {name} in this environment: set it, or give a value")
        value = os.environ[name]
    return name, value
