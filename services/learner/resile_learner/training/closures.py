"""Optimizer steps that evaluate a closure, as in LBFGS: each evaluation is a round, all are committed together.

What an optimizer decides between two evaluations (a line search, say) follows from the loss and the gradients of the
global batch, which are the same bits on all workers. If a member is lost, the step is undone as a whole.
"""

import copy
from collections.abc import Callable, Sequence
from functools import wraps
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from resile_shared.errors import UsageError

from ..state.optimizer import OptimizerState
from .buffers import Buffers
from .iteration import EvaluationAbandoned, Iteration
from .watch.optimizer_watch import OptimizerWatch

Closure = Callable[[], Any]
Step = Callable[[Closure], Any]
GATED = "_resile_gated"
"""The attribute that marks a step which `prepare` has replaced."""


class StepBackup:
    """What a step of ``optimizer`` changes, as it is now: parameters, the optimizer's state, and buffers."""

    def __init__(self, optimizer: torch.optim.Optimizer, buffers: Buffers, watch: OptimizerWatch) -> None:
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._values = [parameter.detach().clone() for parameter in self._parameters]
        self._state = OptimizerState(optimizer)
        self._saved = copy.deepcopy(self._state.state_dict())
        self._buffers = buffers
        self._committed = buffers.committed()
        self._watch, self._steps = watch, watch.steps

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what has changed since the backup was made."""
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.copy_(value)
        self._state.load_state_dict(self._saved)
        self._buffers.reset(self._committed)
        self._watch.steps = self._steps


class ClosureSteps:
    """Lets the steps of a loop's ``optimizers`` take closures. ``current`` is the open iteration, if any."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        watches: Sequence[OptimizerWatch],
        buffers: Buffers,
        current: Callable[[], Iteration | None],
    ) -> None:
        self.are_used = any(isinstance(each, torch.optim.LBFGS) for each in optimizers)
        """Whether the shards of an iteration are kept, since they will be computed again."""
        self._watches = dict(zip(map(id, optimizers), watches, strict=True))
        self._buffers = buffers
        self._current = current
        for each in optimizers:
            if not hasattr(each.step, GATED):
                self._accept_closures(each)

    def begin(self, optimizer: torch.optim.Optimizer) -> StepBackup:
        """Begin a step with a closure in the open iteration; return the backup that undoes it if a member is lost.

        Raises UsageError if no iteration is open, and for a second step.
        """
        iteration = self._current()
        if iteration is None:
            raise UsageError("optimizer.step(closure) was called outside of an iteration: call it in the loop")
        self.are_used = True
        iteration.begin_closure()
        return StepBackup(optimizer, self._buffers, self._watches[id(optimizer)])

    def _accept_closures(self, optimizer: torch.optim.Optimizer) -> None:
        original = optimizer.step

        @wraps(original)
        def step(closure: Closure | None = None) -> Any:
            return original() if closure is None else self._run(optimizer, original, closure)

        optimizer.step = step  # type: ignore[method-assign]

    def _run(self, optimizer: torch.optim.Optimizer, step: Step, closure: Closure) -> Any:
        backup = self.begin(optimizer)
        iteration = self._current()
        assert iteration is not None

        def evaluate() -> Any:
            before = iteration.num_exchanges
            value = closure()
            if iteration.lost:  # whatever the script has caught
                raise EvaluationAbandoned
            if iteration.num_exchanges != before + 1:
                raise UsageError(
                    f"the closure called iteration.exchange() {iteration.num_exchanges - before} times: call it once "
                    "in each evaluation, after the last of iteration.shards()"
                )
            check_value(value, iteration.loss)
            return value

        try:
            result = step(evaluate)
        except EvaluationAbandoned:
            result = None
        if iteration.lost:
            backup.restore()
            return None
        iteration.end_closure()
        return result


class SuspendedStep:
    """A step that waits, in a thread of its own, whenever it needs the value of its closure.

    Meanwhile the loop over a prepared loader goes on, and computes the value batch by batch.
    """

    def __init__(self, step: Step) -> None:
        self.result: Any = None
        self._values: SimpleQueue[Tensor | None] = SimpleQueue()
        self._requests: SimpleQueue[bool | BaseException] = SimpleQueue()
        self._num_threads = torch.get_num_threads()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._thread = Thread(target=self._run, args=(step,), name="optimizer step", daemon=True)
        self._thread.start()

    def needs_value(self) -> bool:
        """Wait until the step asks for the value of its closure, or is done. Raises what the step raises."""
        request = self._requests.get()
        if isinstance(request, BaseException):
            raise request
        return request

    def give(self, value: Tensor) -> None:
        """Let the step go on with the ``value`` that it asked for."""
        self._values.put(value)

    def cancel(self) -> None:
        """End the step, which waits for a value."""
        self._values.put(None)
        self._thread.join()

    def _run(self, step: Step) -> None:
        torch.set_num_threads(self._num_threads)  # bits may depend on it, and each thread has its own
        if self._device is not None:
            torch.cuda.set_device(self._device)
        try:
            self.result = step(self._closure)
            self._requests.put(False)
        except EvaluationAbandoned:
            pass
        except BaseException as error:
            self._requests.put(error)

    def _closure(self) -> Tensor:
        self._requests.put(True)
        value = self._values.get()
        if value is None:
            raise EvaluationAbandoned
        return value


def check_value(value: Any, loss: float | None) -> None:
    """Raises UsageError unless a closure returned the ``loss`` whose gradients were computed."""
    returned = float(value.detach() if isinstance(value, Tensor) else value) if value is not None else None
    if returned is None or loss is None or (returned != loss and loss == loss):
        raise UsageError(
            f"the closure returned {returned}, and the loss of its gradients is {loss}: "
            "return the loss itself, in a hand-written loop iteration.loss, so that the optimizer decides alike on all "
            "workers"
        )
