"""Writes the state diagrams of docs/states.md from the tables in the code: `python -m tests.state_diagrams`."""

import re
from collections.abc import Iterable
from pathlib import Path

from resile_learner.membership import roles
from resile_scheduler.core.state import lifecycle

FILE = Path(__file__).resolve().parents[1] / "docs" / "states.md"
_DIAGRAM = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _diagram(start: str, arrows: Iterable[tuple[str, str, str]], ends: Iterable[str]) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {start}"]
    lines += [f"    {old} --> {new}" + (f": {step}" if step else "") for old, step, new in arrows]
    lines += [f"    {end} --> [*]" for end in ends]
    return "\n".join(["```mermaid", *lines, "```", ""])


def _of_jobs() -> str:
    table = lifecycle.TRANSITIONS
    arrows = [(old.value, step.value, new.value) for old, steps in table.items() for step, new in steps.items()]
    return _diagram(next(iter(table)).value, arrows, (state.value for state, steps in table.items() if not steps))


def _of_roles() -> str:
    table = roles.TRANSITIONS
    order = list(roles.Role)
    arrows = [(old.value, "", new.value) for old, after in table.items() for new in sorted(after, key=order.index)]
    return _diagram(order[0].value, arrows, (role.value for role, after in table.items() if not after))


DIAGRAMS = {"jobs": _of_jobs, "roles": _of_roles}


def written(text: str) -> str:
    """Return the text of docs/states.md with the diagrams as the tables have them."""
    return _DIAGRAM.sub(lambda found: f"{found[1]}{DIAGRAMS[found[2]]()}{found[3]}", text)


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
