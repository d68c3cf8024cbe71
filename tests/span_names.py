"""Writes the names of all spans in docs/traces.md from the code: `python -m tests.span_names`."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

from resile_monitor.api.application import PARTS, UNTRACED
from resile_monitor.api.operations import operations_of
from resile_monitor.changes import ATTACK
from resile_registry import core as registry
from resile_registry.service import TIMED_NAMES as REGISTRY_NAMES
from resile_scheduler.core import events as scheduler
from resile_scheduler.decision_spans import JOB_FAILED, OTHER, OUTCOMES, WORKER_LOST
from resile_shared.bus.subjects import FACTS, FAMILIES, template_of
from resile_shared.telemetry.span_queue import ITERATION

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "traces.md"
SOURCES = ("services", "shared")
MAKERS = frozenset({"traced", "begin", "continued", "step", "span_of", "_add"})
"""Functions whose first argument is the name of a span."""
NAMED_OTHERWISE = {"Tick", "Heartbeat", "HeartbeatReceived", "ProbeExpired", "Report", "JobChangeRequested"}
_LIST = re.compile(r"(<!-- names of spans -->\n).*?(<!-- end -->)", re.DOTALL)


def literals() -> Iterator[str]:
    """The names that the code gives as they are."""
    for source in SOURCES:
        for file in (ROOT / source).rglob("resile_*/**/*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                    function = getattr(node.func, "attr", getattr(node.func, "id", ""))
                    if function in MAKERS and isinstance(node.args[0].value, str):
                        yield node.args[0].value


def requests() -> Iterator[str]:
    for part in PARTS:
        for _, operation in operations_of(part):
            if operation.method != "get" and operation.path not in UNTRACED:
                yield f"{operation.method.upper()} {operation.path}"


def decisions() -> Iterator[str]:
    changes = get_args(get_type_hints(scheduler.JobChangeRequested)["request"])
    named = {event.__name__ for event in (*get_args(scheduler.Event), *get_args(registry.Event), *changes)}
    yield from (f"decide upon {event}" for event in named - NAMED_OTHERWISE)
    yield from (f"decide upon report: {kind.replace('_', ' ')}" for kind in (*FACTS, "peer_suspected"))
    yield from (JOB_FAILED, WORKER_LOST, OTHER, *OUTCOMES.values(), *REGISTRY_NAMES)


def messages() -> Iterator[str]:
    """For each family of subjects."""
    for family, num_tokens in FAMILIES.items():
        template = template_of(".".join(("resile", family, "x", "*")[: 1 + num_tokens])).text
        text = template.replace(f"{family}.x", f"{family}.*")
        yield f"VERB {text}"
    yield "VERB _INBOX"


@cache
def names() -> list[str]:
    return sorted({ITERATION, ATTACK, *literals(), *requests(), *decisions(), *messages()})


def is_known(name: str) -> bool:
    """Whether a span has a name of the list."""
    return any(re.fullmatch(_expression(known), name) for known in names())


def _expression(known: str) -> str:
    return re.escape(known).replace(r"\*", "[a-z_]+").replace("VERB", "(publish|ask|handle|answer)")


def written(text: str) -> str:
    """Return the text of docs/traces.md with the names as the code has them."""
    listed = "".join(f"- `{name}`\n" for name in names())
    return _LIST.sub(lambda found: f"{found[1]}\n{listed}\n{found[2]}", text)


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
