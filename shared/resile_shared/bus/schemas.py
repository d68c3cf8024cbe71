"""Writes the JSON Schemas of messages and an AsyncAPI document: ``python -m resile_shared.bus.schemas [--check]``."""

import argparse
import sys
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from ..messages.commands import CommandResponse, JobExplanations
from .catalogue import COMMANDS, HOST_EVENTS, OTHERS, POOL_EVENTS, QUERIES
from .credentials import PUBLISHER_COMMANDS

FOLDER = Path("docs/schemas")
_ADDRESSES = {
    "heartbeat": "resile.heartbeat.{host}",
    "instruction": "resile.instruction.{host}",
    "probe": "resile.probe.{host}",
    "job": "resile.job.{job}.{kind}",
    "report": "resile.report.{job}.{kind}",
    "suspicion": "resile.suspicion.{job}",
    "log": "resile.log.{job}",
    "trace": "resile.trace.{service}",
    "deadletter": "resile.deadletter",
}

_RESPONSES: dict[str, type[BaseModel]] = {
    "resile.command.": CommandResponse,
    "resile.query.jobs.explain": JobExplanations,
}


def channels() -> dict[str, type[BaseModel]]:
    """Return the model of each kind of subject; what stands in braces differs from message to message."""
    return {
        **{f"resile.host.{{host}}.{what}": model for what, model in HOST_EVENTS.items()},
        **{f"resile.pool.{what}": model for what, model in POOL_EVENTS.items()},
        **{f"resile.command.{name}": model for name, model in COMMANDS.items()},
        **{f"resile.query.{name}": model for name, model in QUERIES.items()},
        **{_ADDRESSES[family]: model for family, model in OTHERS.items()},
    }


def documents() -> dict[str, bytes]:
    """Return the content of each file by its name."""
    models: list[type[BaseModel]] = [*channels().values(), *_RESPONSES.values()]
    files = {f"{model.__name__}.json": _json(model.model_json_schema()) for model in models}
    return files | {"asyncapi.json": _json(_asyncapi())}


def outdated(folder: Path) -> list[str]:
    """Return the names of files that are missing, stale, or no longer made."""
    made = documents()
    there = {file.name: file.read_bytes() for file in folder.glob("*.json")}
    return sorted(name for name in {*made, *there} if made.get(name) != there.get(name))


def write(folder: Path) -> None:
    """Bring the folder up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    made = documents()
    for name in outdated(folder):
        if name in made:
            (folder / name).write_bytes(made[name])
        else:
            (folder / name).unlink()


def _asyncapi() -> dict[str, Any]:
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Resile",
            "version": "1",
            "description": "CloudEvents 1.0 in binary mode over NATS, with W3C traceparent. "
            "Commands and queries are requests.",
        },
        "channels": {
            address.translate({ord("{"): None, ord("}"): None}): _channel(address, model)
            for address, model in channels().items()
        },
        "operations": {name: _operation(name) for name in PUBLISHER_COMMANDS},
    }


def _channel(address: str, model: type[BaseModel]) -> dict[str, Any]:
    responses = [response for prefix, response in _RESPONSES.items() if address.startswith(prefix)]
    names = [spoken.__name__ for spoken in (model, *responses)]
    parameters = [part[1:-1] for part in address.split(".") if part.startswith("{")]
    return {
        "address": address,
        "messages": {name: {"name": f"resile.{name}", "payload": {"$ref": f"./{name}.json"}} for name in names},
        "parameters": {name: {} for name in parameters},
    }


def _operation(name: str) -> dict[str, Any]:
    """Return a command that the account `publisher` may send, and its reply."""
    channel = f"#/channels/resile.command.{name}"
    request, reply = COMMANDS[name].__name__, CommandResponse.__name__
    return {
        "action": "receive",
        "summary": "Open to the account `publisher`: docs/events.md.",
        "channel": {"$ref": channel},
        "messages": [{"$ref": f"{channel}/messages/{request}"}],
        "reply": {"channel": {"$ref": channel}, "messages": [{"$ref": f"{channel}/messages/{reply}"}]},
    }


def _json(document: dict[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def main() -> int:
    """Write the files, or tell with ``--check`` whether they are current."""
    parser = argparse.ArgumentParser(prog="python -m resile_shared.bus.schemas", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not current")
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    options = parser.parse_args()
    if not options.check:
        write(options.folder)
        return 0
    stale = outdated(options.folder)
    if stale:
        print(f"not current: {', '.join(stale)}; run `python -m resile_shared.bus.schemas`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
