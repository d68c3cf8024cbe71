"""``python -m tests.world.holes``: puts back what the protocol was once wrong about, and shows which world notices.

    HOLE=name           this one alone; several are separated by semicolons
    MUTANT_SECONDS=60, MUTANT_PROCESSES=2   as for the mutants

Against most of these holes several protections were built, one behind the other, so that a single mutant goes
unnoticed. Here all of them are switched off at once: the product is as it was.
"""

import sys
from dataclasses import dataclass

from .mutants import MUTANTS, tests_of
from .mutation import Mutant
from .trial import SECONDS, attempt, attempt_all, chosen

_CHECKPOINTER = "resile_learner.checkpoint.checkpointer"
_STORE = "resile_learner.checkpoint.store"
_SUSPICIONS = "resile_scheduler.core.state.suspicions"


@dataclass(frozen=True)
class Hole:
    """What the protocol was wrong about: ``mutants`` together make it so again."""

    name: str
    mutants: tuple[Mutant, ...]
    tests: tuple[str, ...] = ()
    """What notices it where no world can, since worlds are too small for what grows; else those of its modules."""


def _known(*names: str) -> tuple[Mutant, ...]:
    found = {mutant.name: mutant for mutant in MUTANTS}
    return tuple(found[name] for name in names)


def _was(module: str, old: str, new: str) -> Mutant:
    return Mutant("as it was", "", module, old, new)


HOLES = (
    Hole(
        "a pause that meets a change of members never ends",
        (
            *_known(
                "a pause counts only the checkpoints of the active generation", "a pause that is saved is told once"
            ),
            _was(
                _CHECKPOINTER,
                'saved.model_copy(update={"generation": generation, "pausing": pausing})',
                'saved.model_copy(update={"pausing": pausing})',
            ),
            _was(
                _CHECKPOINTER,
                "            generation=self._session.view.generation,\n",
                "            generation=known.checkpoint.generation,\n",
            ),
            _was(
                _CHECKPOINTER,
                "headers[0].is_due or (bool(pauses) and max(pauses) is PauseProgress.UNKNOWN)",
                "headers[0].is_due",
            ),
        ),
    ),
    Hole("a cold start has no deadline", _known("a cold start has no deadline")),
    Hole(
        "initial members each choose a checkpoint, and wait for each other without a deadline",
        (
            *_known("a cold start has no deadline", "initial members choose a checkpoint each for itself"),
            _was(_STORE, "fence = fence_key(lineage) if lineage else None", "fence = None"),
        ),
    ),
    Hole(
        "storage is not fenced",
        (
            *_known(
                "a newer lineage does not fence the older ones in storage",
                "all lineages store their model under one key",
            ),
            _was(
                "resile_learner.checkpoint.lineage",
                "    newest = max((*bases, *(checkpoint.lineage for checkpoint in found)), default=0)\n",
                "    yield from sorted(found, key=lambda c: (c.iteration, c.generation), reverse=True)\n    return\n",
            ),
        ),
    ),
    Hole(
        "the class of device does not tell hosts apart that give other bits",
        (
            _was(
                "resile_learner.devices",
                'return f"{described}, probe {probe(device, described)[:12]}"',
                "return described",
            ),
            _was("resile_learner.devices", 'return ", ".join([*parts, *_environment()])', 'return ", ".join(parts)'),
        ),
        ("tests/learner/test_devices.py",),
    ),
    Hole(
        "a complete checkpoint whose report was lost is ignored",
        _known("a cold start resumes only from what was reported"),
    ),
    Hole(
        "a member that is lost after the completion keeps the others waiting",
        _known("scheduler ends nobody who waits after the completion"),
    ),
    Hole("a record that the bus refuses stops the pool", _known("scheduler ends when the bus refuses a write")),
    Hole(
        "the history of a job is in its record",
        (
            _was(
                "resile_scheduler.executor",
                "        unpublished = (*self._outbox.unpublished(record.job), *items)\n",
                '        history = self.__dict__.setdefault("history", {})\n'
                "        unpublished = history[record.job] = (*history.get(record.job, ()), *items)\n",
            ),
        ),
    ),
    Hole(
        "a completed job fails when its report waits behind others",
        (
            *_known(
                "scheduler does not wait for what agents still have to report",
                "scheduler does not wait for what it still has to read",
                "scheduler ignores that a result was lost with its host",
            ),
        ),
    ),
    Hole(
        "a scheduler that was replaced gives slots away a second time",
        _known("bucket has no fence", "agent starts workers on held slots", "agent obeys schedulers of earlier epochs"),
    ),
    Hole(
        "whom to evict takes time that is exponential in the accusations",
        (
            _was(
                _SUSPICIONS,
                "    for component in _components(workers, opponents):\n",
                "    for component in [set(workers)] if workers else []:\n",
            ),
            _was(_SUSPICIONS, "MAX_EXACT = 20", "MAX_EXACT = 10**9"),
        ),
        ("tests/scheduler/test_suspicions.py",),
    ),
    Hole("every agent watches all allocations", _known("scheduler assigns all jobs to all hosts")),
    Hole(
        "every worker repeats every order to every peer",
        (
            _was(
                "resile_learner.membership.machine",
                "        self._orders[order.generation] = order\n        self._asked = None\n"
                "        if not order.is_recovery:\n            return [",
                "        self._orders[order.generation] = order\n        self._asked = None\n"
                "        if not order.is_recovery:\n"
                "            return [*(SendToPeer(peer, order) for peer in sorted(self._links)), ",
            ),
        ),
        ("tests/learner/test_membership_scale.py",),
    ),
    Hole(
        "a pool that ends drains its hosts before its jobs are saved",
        _known("a pool that ends suspends nothing"),
    ),
)


def main() -> int:
    """Try all holes, or those that are named; return 1 if nothing notices one."""
    if sys.argv[1:2] == ["--try"]:
        hole = next(hole for hole in HOLES if hole.name == sys.argv[2])
        return attempt(hole.mutants, hole.tests or tests_of(*hole.mutants), seconds=SECONDS)
    return 1 if attempt_all("tests.world.holes", chosen("HOLE", [hole.name for hole in HOLES])) else 0


if __name__ == "__main__":
    sys.exit(main())
