"""Validation: fixed batches cut into fixed shards, one round for each, so that the membership can change in between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from resile_shared.errors import UsageError

from ..collectives.tree import Interval, pieces
from ..phases import Phases
from ..session import View
from ..state.run import TrainingProgress
from .attributes import ScriptAttributes
from .buffers import Buffers
from .data.batches import BatchPlan
from .data.fetch import Collate, Fetcher, ShardKey, checked_dataset
from .header import ComputedShards, PartialSums, RoundHeader, fold_leaves
from .metric_names import find_partial_metric
from .rounds import RoundResult, Rounds
from .seeds import mix, seed_all
from .selection import Selection, Selector


@dataclass(frozen=True)
class Validation:
    """What to compute after ``every`` epochs, and at the end.

    ``scores`` is called with the model, in eval mode and without gradients, and a collated batch; it returns means
    over the batch by name. ``on_scores`` is called on each worker with the scores, before ``selection`` decides by them
    and each of ``plateaus`` is stepped.
    """

    dataset: Any
    scores: Callable[[nn.Module, Any], Mapping[str, Tensor | float]]
    collate_fn: Collate | None = None
    every: int = 1
    selection: Selection | None = None
    plateaus: Sequence[ReduceLROnPlateau] = ()
    on_scores: Callable[[Mapping[str, float]], None] | None = None


def open_validator(
    validation: Validation | None,
    model: nn.Module,
    plan: BatchPlan,
    *,
    seed: int,
    buffers: Buffers,
    attributes: ScriptAttributes,
) -> "Validator | None":
    """Return a validator that runs ``validation``, with batches and shards as in ``plan``; None without one."""
    if validation is None:
        return None
    return Validator(validation, model, plan, seed=seed, buffers=buffers, attributes=attributes)


class Validator:
    """Runs validations batch by batch. ``scores`` holds the means of the last one that was completed.

    Every shard starts from the committed ``buffers``: its changes to them are undone.
    """

    def __init__(
        self,
        validation: Validation,
        model: nn.Module,
        plan: BatchPlan,
        *,
        seed: int,
        buffers: Buffers,
        attributes: ScriptAttributes,
    ) -> None:
        dataset = checked_dataset(validation.dataset, name="validation")
        self.num_samples = len(dataset)
        self._plan = BatchPlan(
            self.num_samples,
            plan.batch_size,
            min(plan.num_shards, plan.batch_size),
            seed,
            shuffle=False,
            micro_batch_size=plan.micro_batch_size,
        )
        self._validation = validation
        self._model = model
        self._buffers = buffers
        self._attributes = attributes
        self._seed = seed
        self._fetcher = Fetcher(dataset, seed=mix(seed, "validation"), collate_fn=validation.collate_fn)
        self._next: int | None = None
        self._sums: dict[str, float] = {}
        self.scores: dict[str, float] = {}
        self.selection = validation.selection
        self.selector = Selector(validation.selection, validation.plateaus, model, after_load=buffers.adopt)

    @property
    def in_progress(self) -> bool:
        """Whether a validation was started and not completed."""
        return self._next is not None

    def is_due(self, epoch: int) -> bool:
        """Whether a validation follows ``epoch``, which is not the last."""
        return (epoch + 1) % self._validation.every == 0

    def start(self) -> None:
        """Begin with the first batch."""
        self._next = 0
        self._sums = {}

    def run_batch(
        self, rounds: Rounds, view: View, phases: Phases, *, header: RoundHeader, next_iteration: int
    ) -> RoundResult:
        """Compute this member's shards of the next batch and exchange the sums. They are added to ``header``."""
        assert self._next is not None
        batch = self._plan.batch(self._plan.position(self._next))
        held = batch.held_by(view.rank, view.size)
        round_ = rounds.open(batch.num_shards)
        leaves = {}
        self._buffers.adopt_changed()
        self._attributes.close()
        for leaf in range(*held):
            phases.enter("validation")
            leaves[leaf] = self._score(batch.shard(leaf), batch.weight(leaf))
            self._buffers.restore()
        self._attributes.open()
        phases.enter("waiting")
        if partial := find_partial_metric([(Interval(leaf, leaf + 1), each.scalars) for leaf, each in leaves.items()]):
            raise UsageError(partial)
        partials = [fold_leaves(piece, leaves.__getitem__) for piece in pieces(batch.num_shards, held)]
        header = replace(header, computed=ComputedShards(partials))
        outcome = round_.finish(header, next_iteration=next_iteration)
        scalars = outcome.totals.scalars
        if self._next and (different := sorted(scalars.keys() ^ self._sums.keys())):
            raise UsageError(
                f"the score {different[0]} was returned for some batches of the validation and not for others: scores "
                "are averaged over the whole dataset, so return each of them for every batch"
            )
        for name, value in scalars.items():
            self._sums[name] = self._sums.get(name, 0.0) + value * len(batch.indices)
        self._next += 1
        if self._next == self._plan.per_epoch:
            self._next = None
            self.scores = {name: total / self.num_samples for name, total in self._sums.items()}
        return outcome

    def complete(self, progress: TrainingProgress) -> None:
        """After the round of the last batch: its scores count, and may end the run. Raises UsageError."""
        progress.validation = self.scores
        if self._validation.on_scores:
            self._validation.on_scores(self.scores)
        self.selector.on_scores(self.scores, progress)

    @torch.no_grad()
    def _score(self, indices: Any, weight: float) -> PartialSums:
        (fetched,) = self._fetcher.stream([ShardKey(0, indices)])
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        seed_all(mix(self._seed, "validation", int(indices[0])))
        try:
            scores = self._validation.scores(self._model, fetched.batch)
        finally:
            for module, mode in modes:
                module.training = mode
        return PartialSums({name: float(value) * weight for name, value in scores.items()})

    def state_dict(self) -> dict[str, Any]:
        """How far the validation in progress has come."""
        selector = self.selector.state_dict()
        return {"next": self._next, "sums": self._sums, "scores": self.scores, "selector": selector}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned elsewhere."""
        self._next, self._sums, self.scores = state["next"], dict(state["sums"]), dict(state["scores"])
        self.selector.load_state_dict(state["selector"])
