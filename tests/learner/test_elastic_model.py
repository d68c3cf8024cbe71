"""ElasticModel takes samples of any form with the same bits, and tells its callbacks and its caller the scores."""

from collections.abc import Mapping
from contextvars import Context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from resile.training import Callback, ElasticLoop, ElasticModel, seed
from resile_shared.errors import UsageError


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        outputs: Tensor = self.layer(left if right is None else torch.cat([left, right], dim=1))
        return outputs


class Samples(Dataset[Any]):
    def __init__(self, form: Any) -> None:
        self.form = form
        self.x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        return self.form(x[:2], x[2:], int(x.sum() > 0))


FORMS = {
    "pair": lambda left, right, target: (torch.cat([left, right]), target),
    "triple": lambda left, right, target: (left, right, target),
    "labels": lambda left, right, target: {"labels": target, "left": left, "right": right},
    "target": lambda left, right, target: {"right": right, "left": left, "target": target},
}


class Seen(Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []

    def on_epoch(self, loop: ElasticLoop, epoch: int) -> None:
        self.events.append(("epoch", epoch))

    def on_validation(self, loop: ElasticLoop, epoch: int, scores: Mapping[str, float]) -> None:
        self.events.append(("validation", epoch, scores["loss"]))

    def on_end(self, loop: ElasticLoop, result: Any) -> None:
        self.events.append(("end", result.validation["loss"]))


def train(form: Any) -> tuple[ElasticModel, Seen]:
    def run() -> tuple[ElasticModel, Seen]:
        seed(0)
        model, seen = Two(), Seen()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        data = Samples(form)
        elastic = ElasticModel(model, lambda: (data, data), nn.CrossEntropyLoss(), optimizer, callbacks=[seen])
        assert (elastic.result, elastic.scores) == (None, {})
        assert elastic.train(epochs=3, batch_size=8) is elastic.result
        return elastic, seen

    return Context().run(run)


def test_tuples_of_any_length_and_dicts_have_the_bits_of_pairs() -> None:
    results = {name: train(form)[0].result for name, form in FORMS.items()}
    assert all(result == results["pair"] for result in results.values())


@pytest.mark.parametrize("form", [lambda left, right, target: left, lambda left, right, target: {"left": left}])
def test_a_sample_without_a_target_is_refused(form: Any) -> None:
    with pytest.raises(UsageError, match=r"neither a pair .* nor a dict with the target under one of labels, label"):
        train(form)


def test_callbacks_know_the_scores_of_each_epoch_and_the_object_those_of_the_end() -> None:
    elastic, seen = train(FORMS["pair"])
    names = [event[:2] for event in seen.events[:-1]]
    assert names == [(name, epoch) for epoch in range(3) for name in ("epoch", "validation")]
    losses = [event[2] for event in seen.events if event[0] == "validation"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == elastic.scores["loss"] == seen.events[-1][1]
    assert elastic.is_lowest_rank
