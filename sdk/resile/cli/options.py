"""What many commands share: their options, and the connection to the pool."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from resile_shared.errors import ResileError, UsageError

if TYPE_CHECKING:
    from ..client import Client

T = TypeVar("T")

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
Job = Annotated[str, typer.Argument(metavar="ID", help="The job, by id, or by name if the name is unique.")]


def reach(work: Callable[["Client"], Awaitable[T]], *, server: str | None, home: Path, as_json: bool) -> T:
    """Do ``work`` with a client of the pool; with ``as_json`` a failure is also printed as an object."""
    from ..client import Client, find_server

    async def connected() -> T:
        async with Client(find_server(server, home=home)) as client:
            return await work(client)

    try:
        return asyncio.run(connected())
    except ResileError as error:
        if as_json:
            typer.echo(json.dumps({"error": str(error)}))
        raise


def print_json(document: object) -> None:
    """Print API views, or a document that contains them, as one line of JSON."""
    import orjson
    from pydantic_core import to_jsonable_python

    typer.echo(orjson.dumps(to_jsonable_python(document)))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of text."""
    for line in lines:
        typer.echo(line)


def variable(text: str) -> tuple[str, str]:
    """Parse ``NAME=VALUE``. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {text!r}: must have the form NAME=VALUE")
    if name == "PYTHONHASHSEED":
        raise UsageError("--env PYTHONHASHSEED cannot be set: it is always 0, so that two runs give the same bits")
    return name, value
