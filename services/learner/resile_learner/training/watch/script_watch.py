"""Watches a script while it trains, so that wrong training is named: see docs/elastic-training.md."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..buffers import Buffers
from ..settings import Mode
from ..torch_settings import check_unchanged, script_settings
from .averages import AverageWatch
from .body_watch import BodyWatch
from .buffer_watch import BufferWatch
from .compared_state import ComparedState
from .optimizer_watch import OptimizerWatch, watch_other_optimizers
from .scaler_watch import watch_scalers
from .schedules import ScheduleWatch

_LONGEST_WATCH = 4
"""The number of a worker's first iterations in which one of the watches observes something."""


class ScriptWatch:
    """Watches what a script does with its model, its optimizers and the parts of its ``state``.

    ``has_fixed_length`` is false where there may be more iterations than a schedule was made for. Raises UsageError.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Mapping[str, Any],
        *,
        mode: Mode,
        has_fixed_length: bool,
    ) -> None:
        self._model = model
        self._given = optimizers
        self._state = state
        self.compared = ComparedState(model, optimizers, state, mode=mode)
        self.body = BodyWatch(model, state, self.compared)
        self.optimizers = [OptimizerWatch(model, each, state) for each in optimizers]
        self.buffers = BufferWatch(model)
        self._averages = AverageWatch(model, state)
        self._schedules = ScheduleWatch(state.values() if has_fixed_length else ())
        self._mode = mode
        self._torch_settings: dict[str, str] = {}
        self._num_begun = 0

    @contextmanager
    def watching(self, may_update: Callable[[], bool]) -> Iterator[None]:
        """Training runs in this context; averages of weights may be updated only while ``may_update()`` is true."""
        self._torch_settings = script_settings()
        with (
            self._averages.watch_updates(may_update),
            watch_other_optimizers(self._model, self._given),
            watch_scalers(self._state),
        ):
            yield

    def begin_iteration(self, *, is_compared: bool) -> None:
        """An iteration begins. ``is_compared``: all workers compare its first shard."""
        self._averages.begin_iteration(self._num_begun)
        self.body.begin_iteration(self._num_begun, is_compared=is_compared)
        self._num_begun += 1

    def rely_on_members(self) -> None:
        """As a joiner: what is observed in a worker's first iterations, the members have observed in theirs."""
        self._num_begun = _LONGEST_WATCH

    def check_unchanged(self, *, epoch: int, epochs: int, iterations_total: int) -> None:
        """Refuse what a joining worker could not know, and schedules that count other steps than they get."""
        if self._mode == "same-bits":
            check_unchanged(self._torch_settings)
        for watch in self.optimizers:
            watch.check()
        self._schedules.check(epoch=epoch, epochs=epochs, iterations_total=iterations_total)

    def facts(self, buffers: Buffers, iteration: int, num_evaluations: int, *, compares_state: bool) -> dict[str, str]:
        """Values that the script may have changed since the last exchange, but only in the same way on all workers.

        ``num_evaluations`` of a closure were exchanged in this iteration. They are compared without closures as well: a
        joiner does not know yet whether the script uses them. ``compares_state``: also the parts of the state, which
        may be large.
        """
        facts = self.compared.facts(buffers, iteration, with_parts=compares_state)
        return {**facts, "evaluations": f"{num_evaluations} in {iteration}"}

    @property
    def steps(self) -> list[int]:
        """The number of steps of each optimizer."""
        return [watch.steps for watch in self.optimizers]
