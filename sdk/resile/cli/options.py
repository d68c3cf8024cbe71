"""What many commands share: their options, and the way to the pool."""

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
        help="The pool's address; its token is read from RESILE_TOKEN. Default: the pool of the home.",
    ),
]
Home = Annotated[
    Path,
    typer.Option("--home", metavar="DIR", envvar="RESILE_HOME", help="Home folder of the pool on this machine."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Job = Annotated[str, typer.Argument(metavar="ID", help="The job: its id, or its name if no other job has it.")]


def reach(work: Callable[["Client"], Awaitable[T]], *, server: str | None, home: Path, as_json: bool) -> T:
    """Do ``work`` with a client of the pool; with ``as_json`` a failure is an object on stdout, too."""
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
    """Print views of the API, or what holds them, as one line of JSON."""
    import orjson
    from pydantic_core import to_jsonable_python

    typer.echo(orjson.dumps(to_jsonable_python(document)))


def print_lines(lines: Iterable[str]) -> None:
    """Print lines for people."""
    for line in lines:
        typer.echo(line)


def variable(text: str) -> tuple[str, str]:
    """Take ``NAME=VALUE`` apart. Raises UsageError."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--env {text!r} is not of the form NAME=VALUE")
    if name == "PYTHONHASHSEED":
        raise UsageError("--env PYTHONHASHSEED: it is always 0, or two runs would not give the same bits")
    return name, value
