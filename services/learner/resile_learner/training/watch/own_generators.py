"""Generators of a script's own that the body of its loop draws from: their state depends on the shards computed."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from .repeatability import REMEDY, NotRepeatable

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class OwnGenerators:
    """Finds the generators that the modules of ``model`` and the global names of the script hold.

    Call `begin` before the body computes a shard, and `check` after. One that was drawn from in two shards, and seeded
    in neither, is refused. Generators elsewhere are found only by comparing workers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, Any] = {}
        self._before: dict[str, tuple[int | None, object]] = {}
        self._drawn: set[str] = set()

    def begin(self) -> None:
        """A shard is about to be computed."""
        self._found = dict(self._find())
        self._before = {name: _state(generator) for name, generator in self._found.items()}

    def check(self) -> None:
        """The shard's backward pass is over. Raises NotRepeatable."""
        for name, generator in self._found.items():
            before, now = self._before[name], _state(generator)
            if before == now or before[0] != now[0]:
                self._drawn.discard(name)
            elif name in self._drawn:
                raise NotRepeatable(
                    f"the body of the loop draws from a generator of its own, {name}, whose state depends on how many "
                    f"batches a worker computes. {REMEDY}"
                )
            else:
                self._drawn.add(name)
        self._found = {}

    def _find(self) -> Iterator[tuple[str, Any]]:
        for path, module in self._model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, _KINDS) and not _is_global(value):
                    yield f"model.{path}.{name}" if path else f"model.{name}", value
        for name, value in vars(sys.modules["__main__"]).items():
            if isinstance(value, _KINDS) and not _is_global(value):
                yield name, value


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
