"""Refuses what the body of a loop does in a batch and a worker with other shards would do differently."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from resile_shared.errors import UsageError

from ..digest import bits_of
from .carried_state import CarriedStateWatch
from .compared_state import ComparedState, summed
from .optimizer_watch import WITHOUT_SHARDS
from .own_generators import OwnGenerators

_OBSERVED_ITERATIONS = 3
"""A worker's first iterations are observed: for state carried from batch to batch, and for state that changes."""


class BodyWatch:
    """Refuses a body that depends on which batches a worker computes. Raises UsageError.

    Such a body changes in a batch what may change once an iteration, draws from a generator of its own, or carries
    state from batch to batch. ``state`` are the script's own parts of the run's state, and ``compared`` is what all
    workers have alike.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Any], compared: ComparedState) -> None:
        models = list(model) if isinstance(model, nn.ModuleList) else [model]
        self._model = model
        self._compared = compared
        self._state = state
        self._generators = OwnGenerators(model, state)
        self._carried = CarriedStateWatch(models)
        self._is_observed = False
        self._is_compared = False

    def begin_iteration(self, number: int, *, is_compared: bool) -> None:
        """Iteration ``number`` of this worker begins. ``is_compared``: all workers compare its first shard."""
        self._is_observed = number < _OBSERVED_ITERATIONS
        self._is_compared = is_compared
        self._generators.begin_iteration()
        if not self._is_observed:
            self._carried.stop()

    @contextmanager
    def shard(self, *, is_last: bool) -> Iterator[None]:
        """The body computes a shard in this context. ``is_last``: the worker's last one in the iteration."""
        with ExitStack() as stack:
            if self._is_observed:
                stack.enter_context(self._carried.watch())
            if self._is_compared:
                self._generators.begin()
            options = self._compared.options()
            sums = None if is_last or not (self._is_compared or self._is_observed) else self._sums()
            parameters = {} if sums is None else self._parameters()
            yield
        if is_last:
            return
        self._check_options(options)
        if sums is not None:
            self._check_state(sums)
            self._check_parameters(parameters)

    def on_backward(self) -> None:
        """The gradients of the shard were computed."""
        self._generators.check()

    def end_iteration(self, *, ends_epoch: bool) -> None:
        """An iteration is over, and so is the code that follows its epoch, which may draw what only it needs."""
        if self._is_compared and not ends_epoch:
            self._generators.check_update()

    def _check_options(self, before: list[dict[str, Any]]) -> None:
        for group, earlier in zip(self._compared.options(), before, strict=False):
            for name in group:
                if group[name] != earlier.get(name):
                    raise UsageError(
                        f"the optimizer's {name} changed from {earlier.get(name)} to {group[name]} in a batch that "
                        "does not complete an iteration: it counts batches, of which each worker computes only some. "
                        "Set it once an iteration, after `if loader.sync_gradients:` (or iteration.exchange()), by "
                        "loader.iteration, or use a learning-rate schedule"
                    )

    def _parameters(self) -> dict[str, int]:
        return {name: int(bits_of(parameter)) for name, parameter in self._model.named_parameters()}

    def _check_parameters(self, before: dict[str, int]) -> None:
        for name, value in self._parameters().items():
            if value != before.get(name):
                owner, _, own = name.rpartition(".")
                if own == "weight" and getattr(self._model.get_submodule(owner), "max_norm", None) is not None:
                    raise UsageError(
                        f"the layer {owner} has max_norm, by which its forward pass scales rows of its weight, in each "
                        "worker those of its own batches: leave out max_norm, and scale once an iteration, after `if "
                        f"loader.sync_gradients:` (or iteration.exchange()); or {WITHOUT_SHARDS}"
                    )
                raise UsageError(
                    f"the body of the loop changed the parameter {name} in a batch that does not complete an "
                    "iteration, so that it would change more often on a worker that computes more batches. Change it "
                    "once an iteration, after `if loader.sync_gradients:` (or iteration.exchange())"
                )

    def _sums(self) -> dict[str, list[object]]:
        return {name: list(summed(part.state_dict())) for name, part in self._state.items()}

    def _check_state(self, before: dict[str, list[object]]) -> None:
        for name, sums in self._sums().items():
            if sums != before[name]:
                raise UsageError(
                    f'the part "{name}" of the state changed in a batch that does not complete an iteration: it counts '
                    "batches, of which each worker computes only some. Change it once an iteration, after "
                    "`if loader.sync_gradients:` (or iteration.exchange()), or between epochs"
                )
