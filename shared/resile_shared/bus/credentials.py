"""What a service or a publisher needs to connect to the bus: a file that only its owner can read."""

import os
import secrets
from pathlib import Path

from pydantic import ValidationError

from ..errors import ResileError, UsageError
from ..messages.message import Message

PUBLISHER_COMMANDS = ("host.drain", "host.undrain", "job.pause", "job.priority", "job.resume", "job.stop")
"""What the account `publisher` may send (docs/events.md)."""


class Credentials(Message):
    """Where the bus is, and the user that connects to it."""

    url: str
    user: str
    password: str


def read_credentials(file: Path) -> Credentials:
    """Read a file that `write_credentials` wrote. Raises UsageError."""
    try:
        return Credentials.model_validate_json(file.read_bytes())
    except OSError as error:
        raise UsageError(f"the bus credentials {file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise UsageError(f"{file} holds no bus credentials: it needs url, user and password") from error


def write_credentials(file: Path, credentials: Credentials) -> None:
    """Write the file atomically, readable by its owner alone."""
    write_private(file, credentials.model_dump_json().encode())


def write_private(file: Path, content: bytes) -> None:
    """Replace ``file`` atomically by one that only its owner can read."""
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(content)
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ResileError(f"{file} cannot be written: {error.strerror}") from error
