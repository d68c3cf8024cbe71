"""Variables of a script that are kept in a State continue where the run does."""

from contextvars import Context

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resile.training import State
from resile_learner.state.run import RunState
from resile_shared.errors import UsageError

from .shard_bodies import prepare


def run_state(progress: State) -> RunState:
    return RunState(nn.Linear(1, 1), {}, {"progress": progress}, after_load=lambda: None)


def test_a_worker_that_joins_or_resumes_has_the_values_of_the_run() -> None:
    ahead = State(best=0.0, names=["a"], weights=None)
    ahead.best, ahead.weights, ahead.since = 0.75, torch.ones(2), 3
    ahead.names.append("b")
    behind = State(best=0.0, names=["a"], weights=None, outdated=True)
    flat = run_state(ahead).flatten()
    run_state(behind).load(flat.skeleton, flat.tensors)
    assert (behind.best, behind.names, behind.since) == (0.75, ["a", "b"], 3)
    assert behind.weights.tolist() == [1.0, 1.0]
    assert not hasattr(behind, "outdated")


def test_what_counts_batches_of_one_worker_is_refused() -> None:
    def run() -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        progress = State(batches=0)
        loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=8)
        _, _, loader = prepare(model, optimizer, loader, num_shards=2, state={"progress": progress})
        for _ in loader.epochs(1):
            for (inputs,) in loader:
                model(inputs).mean().backward()
                optimizer.step()
                progress.batches += 1

    with pytest.raises(UsageError, match='the part "progress" of the state changed in a batch'):
        Context().run(run)
