"""Writes the HTTP API as an OpenAPI document: ``python -m resile_monitor.openapi [--check]``."""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from resile_shared.http import api

from .api.application import PARTS
from .api.operations import Content, Operation, operations_of

FILE = Path("docs/openapi.json")
_SCHEMAS = "#/components/schemas/"
OPERATIONS = tuple(operation for part in PARTS for _, operation in operations_of(part))


def document() -> bytes:
    """Return the content of the file."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    made = {
        "openapi": "3.1.0",
        "info": {"title": "Resile", "version": "1", "description": "See docs/api.md."},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": models_json_schema(
                [(model, "serialization") for model in dict.fromkeys(_models())], ref_template=_SCHEMAS + "{model}"
            )[1]["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    return orjson.dumps(made, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def _models() -> Iterator[type[BaseModel]]:
    yield api.Problem
    for operation in OPERATIONS:
        for content in (operation.answer, operation.body, operation.streams):
            if content is not None and not isinstance(content, str):
                yield content


def _described(operation: Operation) -> dict[str, Any]:
    answer = _content(operation.answer)
    if operation.streams:
        answer["text/event-stream"] = {"schema": {"$ref": _SCHEMAS + operation.streams.__name__}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": list(_parameters(operation)),
        "responses": {
            str(operation.status): {"description": "done", "content": answer},
            "default": {
                "description": "what is wrong, and what to do",
                "content": {"application/problem+json": {"schema": {"$ref": f"{_SCHEMAS}Problem"}}},
            },
        },
    }
    if operation.body:
        described["requestBody"] = {"content": _content(operation.body)}
    return described


def _content(content: Content) -> dict[str, Any]:
    if isinstance(content, str):
        return {content: {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": {"$ref": _SCHEMAS + content.__name__}}}


def _parameters(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", operation.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    if operation.query:
        for name, schema in operation.query.model_json_schema()["properties"].items():
            yield {"name": name, "in": "query", "schema": schema}
    if operation.streams:
        yield {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}}
    if operation.method != "get" and operation.is_keyed:
        yield {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 200}}


def main() -> int:
    """Write the file, or with ``--check`` only check that it is current."""
    parser = argparse.ArgumentParser(prog="python -m resile_monitor.openapi", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the file is not current")
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    options = parser.parse_args()
    if not options.check:
        options.file.write_bytes(document())
        return 0
    if not options.file.exists() or options.file.read_bytes() != document():
        print(f"{options.file} is not current; run `python -m resile_monitor.openapi`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
