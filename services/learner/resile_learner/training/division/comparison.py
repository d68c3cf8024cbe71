"""What the workers of a run compare in an iteration: what differs is a mistake, and is named before anything counts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...session import View
from ...state.facts import Facts
from ..buffers import Buffers
from ..data.batches import Position
from ..rounds import RoundResult
from ..torch_settings import check_unchanged, script_settings
from ..watch.compared_state import ComparedState
from ..watch.own_generators import OwnGenerators
from ..watch.repeatability import NewMembers, is_compared_in_epoch, is_compared_iteration


class Comparison:
    """Compares what the script changes between iterations, and what each worker makes of the same shard.

    All workers compute the first shard of an iteration's first call in a few iterations, and new members once.
    """

    def __init__(
        self,
        models: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Mapping[str, Any],
        buffers: Buffers,
    ) -> None:
        self._buffers = buffers
        self._new_members = NewMembers()
        self._generators = OwnGenerators(models, state, drawer="the model")
        self._compared = ComparedState(models, optimizers, state, mode="same-bits")
        self._members: tuple[int, ...] = ()
        """Those of the newest iteration that was committed on this worker."""
        self._settings: dict[str, str] = {}
        self._iteration = 0
        self._compares_parts = False
        self.computes_first_shard = False
        """Whether this worker computes the first shard, beside its own, to be compared."""

    @property
    def is_new(self) -> bool:
        """Whether this worker has not been compared with others yet."""
        return self._new_members.is_new

    def begin(self) -> None:
        """The run begins."""
        self._settings = script_settings()

    def begin_iteration(self, iteration: int, position: Position, view: View) -> None:
        """An iteration begins, before the script gets its batch. Raises UsageError for settings that have changed."""
        check_unchanged(self._settings)
        self._iteration = iteration
        starts_epoch, is_rare = position.sample == 0, is_compared_iteration(iteration)
        is_due = is_rare or (starts_epoch and is_compared_in_epoch(position.epoch))
        self._compares_parts = is_rare or starts_epoch
        self.computes_first_shard = is_due or self._new_members.takes_part(view)
        self._buffers.begin_iteration(compares_values=is_due or view.workers != self._members)

    def facts(self) -> Facts:
        """What is compared in the first round of the iteration."""
        return self._compared.facts(self._buffers, self._iteration, with_parts=self._compares_parts)

    def parts(self) -> Facts:
        """The parts of the script's state."""
        return self._compared.parts()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A shard is computed in this context. Raises NotRepeatable if it draws from a generator of its own."""
        if not self.computes_first_shard:
            yield
            return
        self._generators.begin()
        yield
        self._generators.check()

    def on_first_round(self, result: RoundResult, view: View) -> None:
        """The first round of the iteration is complete, in which the members of ``view`` took part."""
        if result.tag.generation != view.generation:  # others have completed it without this worker
            return
        are_new = [header.is_new for header in result.headers]
        self._new_members.on_round(view, are_new, [header.computed.first_shard for header in result.headers])

    def end_iteration(self, view: View) -> None:
        """The iteration is over."""
        self._members = view.workers
