"""The command that sends a command over the bus, as a system outside the pool does."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from resile_shared.bus.credentials import PUBLISHER_COMMANDS
from resile_shared.errors import ResileError, UsageError

from .options import DEFAULT_HOME, AsJson, Home, show

if TYPE_CHECKING:
    from pydantic import BaseModel

    from resile_shared.bus.credentials import Credentials
    from resile_shared.messages.commands import Accepted, Refused

app = typer.Typer(rich_markup_mode=None)


@app.command(short_help="Send a command over the bus, as a system outside the pool does.")
def publish(
    name: Annotated[str, typer.Argument(metavar="COMMAND", help=f"One of {', '.join(PUBLISHER_COMMANDS)}.")],
    body: Annotated[str, typer.Argument(metavar="JSON", help="Body of the command: docs/schemas/ has the schemas.")],
    *,
    message_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            help="Id of the command, which takes effect once however often it is sent. Default: new.",
        ),
    ] = None,
    credentials: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Account to use. Default: bus/credentials/publisher.json of the pool in the home."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=0.1, help="How long to wait for the answer.")
    ] = 30.0,
    home: Home = DEFAULT_HOME,
    as_json: AsJson = False,
) -> None:
    r"""Send a command over the bus with the account `publisher`, and print the answer.

    \b
    resile publish host.drain '{"host_id": "host-2", "deadline_seconds": 90}'
    resile publish job.priority '{"job_id": "job-7", "priority": 8000}'

    A system that speaks NATS does the same without Resile: docs/events.md.
    """
    from resile_shared.bus.credentials import read_credentials

    request = _request(name, body)
    file = credentials or home.expanduser() / "bus" / "credentials" / "publisher.json"
    answer = asyncio.run(
        _ask(read_credentials(file), name=name, request=request, message_id=message_id, seconds=seconds)
    )
    if answer.kind == "refused":
        raise ResileError(answer.reason)
    show(answer, [f"accepted: {name}"], as_json=as_json)


def _request(name: str, body: str) -> "BaseModel":
    """Return the checked command. Raises UsageError."""
    from pydantic import ValidationError

    from resile_shared.bus.catalogue import COMMANDS
    from resile_shared.validation import describe

    if name not in PUBLISHER_COMMANDS:
        raise UsageError(f"{name!r} cannot be published: use one of {', '.join(PUBLISHER_COMMANDS)}")
    model = COMMANDS[name]
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        schema = f"docs/schemas/{model.__name__}.json"
        raise UsageError(f"invalid body of {name}: {describe(error, model)}; its schema is {schema}") from error


async def _ask(
    credentials: "Credentials", *, name: str, request: "BaseModel", message_id: str | None, seconds: float
) -> "Accepted | Refused":
    from resile_shared.bus import subjects
    from resile_shared.bus.client import Bus

    try:
        async with asyncio.timeout(seconds):
            bus = await Bus.open(credentials, service="publisher")
            try:
                return await bus.ask(subjects.command(*name.split(".")), request, message_id=message_id)
            finally:
                await bus.close()
    except TimeoutError:
        raise ResileError(
            f"no answer from the pool at {credentials.url} within {seconds:g} s: the command may still take effect; "
            "check that the pool is up, and send it again with the same --id"
        ) from None
