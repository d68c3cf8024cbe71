"""What the scores of validations decide: which model is kept, when training ends early, and learning rates.

The scores are the same bits on all workers, so all decide alike; what they have decided is part of the run's state.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from resile_shared.errors import UsageError

from ..state.run import (
    TrainingProgress,
    extra_states,
    load_extra_states,
    load_model_tensors,
    model_tensors,
)

Goal = Literal["min", "max"]


@dataclass(frozen=True)
class Selection:
    """Judges a model by a ``score`` of its validations; the best one has the least ("min") or the greatest ("max").

    With ``keep_best`` the run ends with the best model, else with the last one. ``patience`` is the number of
    validations in a row without a better score after which training ends; None: never. A score is better if it differs
    from the best by more than ``min_delta``. Raises UsageError for values that cannot work.
    """

    score: str = "loss"
    goal: Goal = "min"
    keep_best: bool = True
    patience: int | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.goal not in ("min", "max"):
            raise UsageError(f'goal is {self.goal!r}: use "min" or "max"')
        if self.patience is not None and self.patience < 1:
            raise UsageError(f"patience is {self.patience}: use 1 or more validations, or None")
        if not 0 <= self.min_delta < math.inf:
            raise UsageError(f"min_delta is {self.min_delta}: use 0 or more")

    def is_better(self, score: float, best: float | None) -> bool:
        """Whether ``score`` is better than the ``best`` so far; None: there is none."""
        if math.isnan(score):
            return False
        if best is None:
            return True
        return best - score > self.min_delta if self.goal == "min" else score - best > self.min_delta


@dataclass(frozen=True)
class Best:
    """The validation with the best score: the epoch that it followed, from 0, the iterations made, and its scores."""

    epoch: int
    iteration: int
    scores: Mapping[str, float]


class Selector:
    """Acts on the scores of each completed validation, alike on all workers.

    ``plateaus`` are stepped with the selection's score, or the loss. ``after_load`` is called when the best model was
    loaded into ``model``. ``best`` is None before the first validation, and without a selection.
    """

    def __init__(
        self,
        selection: Selection | None,
        plateaus: Sequence[ReduceLROnPlateau],
        model: nn.Module,
        *,
        after_load: Callable[[], None],
    ) -> None:
        self.best: Best | None = None
        self._selection = selection
        self._plateaus = plateaus
        self._model = model
        self._after_load = after_load
        self._kept: dict[str, Tensor | None] = {}
        self._kept_extra: dict[str, Any] = {}
        self._num_without_better = 0
        goal = selection.goal if selection else "min"
        for plateau in plateaus:
            if plateau.mode != goal:
                raise UsageError(
                    f'ReduceLROnPlateau has the mode "{plateau.mode}", and the score that it gets is better the '
                    f'{"lower" if goal == "min" else "higher"} it is: give it mode="{goal}", or a selection with '
                    f'goal="{plateau.mode}"'
                )

    def on_scores(self, scores: Mapping[str, float], progress: TrainingProgress) -> None:
        """Act on the ``scores`` of a validation; it may end the run. Raises UsageError if the score is not there."""
        if self._plateaus:
            score = _score(scores, self._selection.score if self._selection else "loss")
            for plateau in self._plateaus:
                plateau.step(score)
        if self._selection is None:
            return
        if self._selection.is_better(_score(scores, self._selection.score), self._best_score(self._selection)):
            self.best = Best(progress.last_epoch, progress.iteration, dict(scores))
            self._num_without_better = 0
            if self._selection.keep_best:
                self._kept = _copies(model_tensors(self._model))
                self._kept_extra = copy.deepcopy(extra_states(self._model))
        else:
            self._num_without_better += 1
        if self._selection.patience is not None and self._num_without_better >= self._selection.patience:
            progress.iterations_total = progress.iteration
        if progress.iteration == progress.iterations_total:
            self._load_best()

    def final_scores(self, last: Mapping[str, float]) -> Mapping[str, float]:
        """The scores of the model with which the run ends, where those of its last validation are ``last``."""
        return self.best.scores if self.best and self._selection and self._selection.keep_best else last

    def _best_score(self, selection: Selection) -> float | None:
        return self.best.scores[selection.score] if self.best else None

    def _load_best(self) -> None:
        if self._kept:
            load_model_tensors(self._model, self._kept)
            load_extra_states(self._model, self._kept_extra)
            self._after_load()

    def state_dict(self) -> dict[str, Any]:
        """The best scores, the model that has them, and what the schedules have seen."""
        return {
            "best": vars(self.best) if self.best else None,
            "model": self._kept,
            "extra": self._kept_extra,
            "num_without_better": self._num_without_better,
            "plateaus": [plateau.state_dict() for plateau in self._plateaus],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self.best = Best(**state["best"]) if state["best"] else None
        self._kept = dict(state["model"])
        self._kept_extra = state.get("extra", {})  # older versions stored none
        self._num_without_better = state["num_without_better"]
        for plateau, received in zip(self._plateaus, state["plateaus"], strict=True):
            plateau.load_state_dict(received)


def _copies(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Copies in the memory of the host."""
    return {name: None if tensor is None else tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def _score(scores: Mapping[str, float], name: str) -> float:
    if name not in scores:
        raise UsageError(
            f'the validation has no score "{name}" by which models are selected: it has {", ".join(sorted(scores))}'
        )
    return scores[name]
