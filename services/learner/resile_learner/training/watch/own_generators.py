"""Generators of a script's own that the body of its loop draws from.

Within a shard their state depends on which shards a worker computes; after the exchange, on when it joined.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from resile_shared.errors import UsageError

from .repeatability import REMEDY, NotRepeatable

States = dict[str, tuple[int | None, object]]
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class OwnGenerators:
    """Finds the generators that the modules of ``model`` and the global names of the script hold.

    Call `begin` before the body computes a shard, `check` after its backward pass, and `check_update` at the end of the
    iteration. A generator that was drawn from in two shards, and seeded in neither, is refused; so is one drawn from
    after two exchanges, unless a part of ``state`` holds it. Generators elsewhere are found only by comparing workers.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any], *, drawer: str = "the body of the loop") -> None:
        self._drawer = drawer
        self._model = model
        self._state = state
        self._found: dict[str, Any] = {}
        self._before: States = {}
        self._after: States = {}
        self._drawn: set[str] = set()
        self._drawn_in_updates: set[str] = set()

    def begin_iteration(self) -> None:
        """Begin an iteration, before its first shard."""
        self._found, self._after = {}, {}

    def begin(self) -> None:
        """A shard is about to be computed."""
        self._found = dict(self._find())
        self._before = self._states()

    def check(self) -> None:
        """The shard's backward pass is over. Raises NotRepeatable."""
        self._after = self._states()
        for name in _drawn(self._before, self._after, self._drawn):
            raise NotRepeatable(
                f"{self._drawer} draws from a generator of its own, {name}, whose state depends on how many batches a "
                f"worker computes. {REMEDY}"
            )

    def check_update(self) -> None:
        """The iteration, which does not end an epoch, is over. Raises UsageError."""
        for name in _drawn(self._after, self._states(), self._drawn_in_updates):
            if not self._is_kept(self._found[name]):
                raise UsageError(
                    f"the body of the loop draws from a generator of its own, {name}, after the backward pass, and a "
                    "worker that joins or resumes would begin it anew. Draw from the global generators of python, "
                    "numpy or torch, which are seeded for each update, or keep it in an object of state={...} of the "
                    "training call"
                )

    def _states(self) -> States:
        return {name: _state(generator) for name, generator in self._found.items()}

    def _is_kept(self, generator: Any) -> bool:
        """Whether a part of the state holds a generator, or a module that has extra state."""
        extra = [each for each in self._model.modules() if type(each).get_extra_state is not nn.Module.get_extra_state]
        owners = [*self._state.values(), *extra]
        return any(generator is held for owner in owners for held in (owner, *getattr(owner, "__dict__", {}).values()))

    def _find(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, _KINDS) and not _is_global(value):
                    yield f"model.{path}.{name}" if path else f"model.{name}", value
        for name, value in vars(sys.modules["__main__"]).items():
            if isinstance(value, _KINDS) and not _is_global(value):
                yield name, value


def _drawn(before: States, now: States, earlier: set[str]) -> list[str]:
    """Return those that were drawn from this time and the time before, ``earlier``, which is updated."""
    drawn = {name for name in before.keys() & now if before[name] != now[name] and before[name][0] == now[name][0]}
    again = sorted(drawn & earlier)
    earlier.clear()
    earlier |= drawn
    return again


def _state(generator: Any) -> tuple[int | None, object]:
    """What a generator was seeded with, where that is known, and its state."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed(), generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return None, repr(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return None, repr(generator.get_state(legacy=False))
    return None, generator.getstate()


def _is_global(generator: Any) -> bool:
    """Whether it is one of those that are seeded for each shard."""
    return generator is torch.default_generator or any(generator is each for each in torch.cuda.default_generators)
