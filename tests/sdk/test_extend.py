"""The smallest adapter, as the documentation of `resile.training.extend` has it, trains what a loop by hand trains."""

from contextvars import Context
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import resile.training
from resile.training import ElasticLoop, extend

SETTINGS = {"epochs": 2, "batch_size": 8, "num_shards": 4}


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.utils.data.Dataset[Any]]:
    resile.training.seed()
    model = nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randint(0, 2, (32,)))
    return model, torch.optim.AdamW(model.parameters()), data


def by_hand() -> str:
    model, optimizer, data = parts()
    loop = ElasticLoop(model, optimizer, data, **SETTINGS)
    for iteration in loop:
        for inputs, targets in iteration.shards():
            iteration.backward(functional.cross_entropy(model(inputs), targets))
        if iteration.exchange():
            optimizer.step()
    assert loop.result
    return loop.result.params_sha256


def by_adapter() -> str:
    _, _, example = (extend.__doc__ or "").partition("def train(")
    code = "def train(" + example[: example.index("\n\n- ")]
    names: dict[str, Any] = {**vars(extend), "ElasticLoop": ElasticLoop}
    exec("\n".join(line.removeprefix("    ") for line in code.splitlines()), names)
    model, optimizer, data = parts()

    def step(batch: Any) -> None:
        inputs, targets = batch
        functional.cross_entropy(model(inputs), targets).backward()

    result: str = names["train"](step, model, optimizer, data, **SETTINGS).params_sha256
    return result


def test_the_smallest_adapter_gives_the_bits_of_a_loop_by_hand() -> None:
    assert Context().run(by_adapter) == Context().run(by_hand)


def test_whatever_is_offered_is_there() -> None:
    assert all(hasattr(extend, name) for name in extend.__all__)
