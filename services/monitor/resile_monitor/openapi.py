"""Writes the HTTP API as an OpenAPI document: ``python -m resile_monitor.openapi [--check]``."""

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from resile_shared.http import api
from resile_shared.http.slots import SlotsView
from resile_shared.messages.datasets import Dataset
from resile_shared.messages.jobs import JobSpec

from .api.downloads import ModelQuery
from .api.events import EventQuery
from .api.jobs import HistoryQuery
from .api.logs import LogQuery
from .api.slots import SlotsQuery
from .api.usage import UsageQuery

FILE = Path("docs/openapi.json")
_SCHEMAS = "#/components/schemas/"
Content = type[BaseModel] | str
"""What a body holds: JSON of a model, or any bytes of a media type."""


@dataclass(frozen=True)
class Operation:
    """One request, and its answer."""

    method: str
    path: str
    summary: str
    answer: Content
    status: int = 200
    body: Content | None = None
    query: type[BaseModel] | None = None
    streams: type[BaseModel] | None = None
    """What server-sent events carry, for a request that can follow."""
    is_keyed: bool = True
    """Whether a request repeated with its Idempotency-Key takes effect once; requests that only read have no key."""


_TAR, _GZIP, _MODEL = "application/x-tar", "application/gzip", "application/octet-stream"
OPERATIONS = (
    Operation("get", "/v1/jobs", "All jobs", api.JobList),
    Operation("post", "/v1/jobs", "Submit a job", api.Submission, status=201, body=JobSpec),
    Operation("get", "/v1/jobs/{job}", "One job, with its history", api.JobView),
    Operation(
        "get",
        "/v1/jobs/{job}/history",
        "A page of a job's history",
        api.HistoryPage,
        query=HistoryQuery,
    ),
    Operation("get", "/v1/jobs/{job}/changes", "What changed, how long it took, and why", api.ChangeList),
    Operation("get", "/v1/traces/{trace}", "The steps of one change", api.TraceView),
    Operation(
        "post",
        "/v1/traces/{trace}/attacks",
        "Add an attack to the change it caused",
        api.Empty,
        body=api.NewAttack,
        is_keyed=False,
    ),
    Operation("get", "/v1/jobs/{job}/spec", "What was submitted", JobSpec),
    Operation("get", "/v1/jobs/{job}/curves", "Loss, metrics, scores and speed, thinned", api.CurvesView),
    Operation("get", "/v1/jobs/{job}/ledger", "How often each epoch's samples were used", api.LedgerView),
    Operation("get", "/v1/jobs/{job}/code", "The folder of code that was submitted", _GZIP),
    Operation("get", "/v1/jobs/{job}/model", "The final model", _MODEL, query=ModelQuery),
    Operation("get", "/v1/jobs/{job}/output", "What the workers wrote to RESILE_OUTPUT_DIR", _TAR),
    Operation(
        "get", "/v1/jobs/{job}/logs", "What the workers printed", api.LogList, query=LogQuery, streams=api.LogEntry
    ),
    Operation("post", "/v1/jobs/{job}/priority", "Change the priority of a job", api.Empty, body=api.NewPriority),
    Operation("post", "/v1/jobs/{job}/stop", "End a job for good", api.Empty, body=api.StopJob),
    Operation(
        "post",
        "/v1/jobs/{job}/pause",
        "Pause a job: save a checkpoint, then release all its slots",
        api.Empty,
        body=api.Empty,
    ),
    Operation("post", "/v1/jobs/{job}/resume", "Resume a paused job", api.Empty, body=api.Empty),
    Operation("delete", "/v1/jobs/{job}", "Remove a job that has ended, with everything stored for it", api.Empty),
    Operation("get", "/v1/hosts", "All hosts, and what runs on their slots", api.HostList),
    Operation("get", "/v1/hosts/{host}", "One host", api.HostView),
    Operation("post", "/v1/hosts/{host}/drain", "Free a host of workers", api.Empty, body=api.DrainHost),
    Operation(
        "post",
        "/v1/hosts/{host}/join",
        "What a new host's agent needs",
        api.Admission,
        body=api.JoinHost,
        is_keyed=False,
    ),
    Operation("get", "/v1/policy", "How jobs share the slots of the pool", api.PolicyView),
    Operation("put", "/v1/policy", "Change how jobs share slots", api.PolicyView, body=api.NewPolicy),
    Operation("get", "/v1/tenants", "The tenants of the pool, and what each gets", api.TenantList),
    Operation("put", "/v1/tenants/{tenant}", "Change what a tenant gets", api.TenantList, body=api.NewTenant),
    Operation("delete", "/v1/tenants/{tenant}", "Reset a tenant to the defaults", api.TenantList),
    Operation("get", "/v1/usage", "What was used, by tenant and job", api.UsageView, query=UsageQuery),
    Operation("get", "/v1/slots", "Who held how many slots over time, thinned", SlotsView, query=SlotsQuery),
    Operation("post", "/v1/pool/suspend", "Save all jobs before the pool stops", api.Suspension, body=api.Empty),
    Operation("get", "/v1/events", "Events of the pool", api.EventList, query=EventQuery, streams=api.EventView),
    Operation("get", "/v1/models", "The models of completed jobs", api.ModelList),
    Operation("get", "/v1/datasets", "All datasets", api.DatasetList),
    Operation("get", "/v1/datasets/{dataset}", "A dataset as it was registered", Dataset),
    Operation(
        "put", "/v1/datasets/{dataset}", "Register a dataset as it is now", Dataset, body=api.NewDataset, is_keyed=False
    ),
    Operation("delete", "/v1/datasets/{dataset}", "Remove a dataset; its files stay", api.Empty),
    Operation("get", "/v1/webhooks", "All webhooks", api.WebhookList),
    Operation("post", "/v1/webhooks", "Add a webhook", api.WebhookCreated, status=201, body=api.NewWebhook),
    Operation("delete", "/v1/webhooks/{webhook}", "Remove a webhook", api.Empty),
    Operation(
        "post", "/v1/packages", "Store a folder of code", api.PackageView, status=201, body=_GZIP, is_keyed=False
    ),
)


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
