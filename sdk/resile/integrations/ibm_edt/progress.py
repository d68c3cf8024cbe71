"""What a FabricModel knows beside model, optimizer and schedule: part of the run's state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resile_shared.errors import UsageError

from ..callback_state import CallbackState, is_everywhere


class FabricProgress:
    """The scores of the epoch so far, those of all validations, and what callbacks know.

    It changes only after the exchange of an iteration, so that members that repeat one have the same state.
    """

    may_differ = True
    """The learner does not compare the plain values of this state; `check` does, in each iteration."""

    def __init__(self, callbacks: Callable[[], Sequence[Any]]) -> None:
        self.callbacks = CallbackState(callbacks)
        self.num_batches = 0
        """The number of engine batches so far, of all workers."""
        self.tests: list[dict[str, float]] = []
        """The scores of each validation, with its number of batches so far as "steps"."""
        self.untold: int | None = None
        """The epoch whose validation the loggers do not know yet."""
        self._sums: dict[str, float] = {}
        self._num_samples = 0

    def add(self, scores: Mapping[str, float], *, num_batches: int, num_samples: int) -> None:
        """Count an iteration, whose means over its global batch are ``scores``."""
        self.num_batches += num_batches
        self._num_samples += num_samples
        for name, value in scores.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * num_samples

    @property
    def means(self) -> dict[str, float]:
        """The means over the samples of the epoch so far."""
        return {name: total / self._num_samples for name, total in self._sums.items()}

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self._sums, self._num_samples = {}, 0

    def digest(self) -> int:
        """What must be equal on all workers, as one number."""
        return self.callbacks.digest({name: value for name, value in self.state_dict().items() if name != "callbacks"})

    def check(self, mean_digest: float) -> None:
        """Compare the mean of all workers' digests with this worker's. Raises UsageError if they differ."""
        if not is_everywhere(self.digest(), mean_digest):
            raise UsageError(
                "the state of callbacks differs between workers, so a joining worker could not continue: "
                "an attribute of theirs depends on the time or on the worker. Keep it in a variable of the script "
                "instead of an attribute"
            )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a joiner has to know."""
        return {
            "num_batches": self.num_batches,
            "tests": self.tests,
            "untold": self.untold,
            "sums": self._sums,
            "num_samples": self._num_samples,
            "callbacks": self.callbacks.changed(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self.num_batches, self.untold = state_dict["num_batches"], state_dict["untold"]
        self.tests, self._sums = list(state_dict["tests"]), dict(state_dict["sums"])
        self._num_samples = state_dict["num_samples"]
        self.callbacks.load(state_dict["callbacks"])
