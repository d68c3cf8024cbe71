"""Resile's Accelerator: what accelerate's computes in one process, and every method either works or is refused."""

from collections.abc import Callable, Iterator
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from resile.integrations.accelerate import Accelerator
from resile.integrations.accelerate.accelerator import _INSTEAD
from resile.training import prepare, seed
from resile_learner.session import SoloSession
from resile_shared.errors import UsageError

from .late_joiner import train_and_join_late


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(call: Callable[[], Any]) -> Any:
    """Run ``call`` as a script of its own, with its one training call."""
    return Context().run(call)


def parts(**more: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    x = torch.randn(45, 4, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    return model, optimizer, DataLoader(dataset, **{"batch_size": 9, **more}), schedule


def trained(accelerator: Any, *, clip: bool = True, each_batch: Callable[[Any], object] = lambda loader: None) -> Any:
    """Train by the loop that the documentation of accelerate has."""

    def run() -> list[torch.Tensor]:
        model, optimizer, loader, schedule = accelerator.prepare(*parts())
        epochs = loader.epochs(2) if hasattr(loader, "epochs") else range(2)
        for _ in epochs:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(F.cross_entropy(model(x), y))
                    if accelerator.sync_gradients and clip:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                each_batch(loader)
        return [parameter.detach() for parameter in model.parameters()]

    return alone(run)


@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_parameters_are_those_of_accelerate(accumulate: int, precision: str) -> None:
    """Equal but for the order of additions."""
    more: dict[str, Any] = {"mixed_precision": precision, "gradient_accumulation_steps": accumulate, "cpu": True}
    expected = trained(accelerate.Accelerator(**more))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    tolerance = 1e-2 if precision == "bf16" else 1e-5
    for mine, theirs in zip(trained(Accelerator(**more)), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_the_bits_are_those_of_prepare() -> None:
    def by_prepare() -> list[torch.Tensor]:
        model, optimizer, loader, schedule = prepare(*parts(), num_shards=3, seed=4)
        for _ in loader.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
        return list(model.parameters())

    accelerated = trained(Accelerator(num_shards=3, seed=4, cpu=True))
    assert all(map(torch.equal, accelerated, alone(by_prepare)))


GATHERING = ("gather", "gather_for_metrics", "reduce")


@pytest.mark.parametrize("method", [*_INSTEAD, *GATHERING])
def test_a_method_that_cannot_hold_is_refused_by_name(method: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=5 if method in GATHERING else 1)
    with pytest.raises(UsageError, match=rf"accelerator\.{method}\(\)"):
        trained(accelerator, each_batch=lambda loader: getattr(accelerator, method)(torch.ones(1)))


@pytest.mark.parametrize("method", GATHERING)
def test_each_worker_has_the_whole_batch_in_the_body_of_the_loop(method: str) -> None:
    accelerator = Accelerator(cpu=True)
    found: list[torch.Tensor] = []
    trained(accelerator, each_batch=lambda loader: found.append(getattr(accelerator, method)(torch.ones(3))))
    assert all(torch.equal(each, torch.ones(3)) for each in found)
    assert found


@pytest.mark.parametrize(
    "more",
    [
        {"mixed_precision": "fp16"},
        {"log_with": "tensorboard"},
        {"split_batches": True},
        {"kwargs_handlers": []},
        {"deepspeed_plugins": None},
        {"fsdp_plugin": None},
        {"dynamo_backend": "inductor"},
        {"rng_types": ["torch"]},
        {"gradient_accumulation_plugin": None},
        {"dataloader_config": None},
        {"parallelism_config": None},
    ],
)
def test_an_argument_that_cannot_hold_is_refused_by_name(more: dict[str, Any]) -> None:
    (name,) = more
    with pytest.raises(UsageError, match=name):
        Accelerator(cpu=True, **more)


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        (lambda model, optimizer, loader, schedule: (model,), "a model without its optimizer"),
        (lambda model, optimizer, loader, schedule: (optimizer, loader), "0 objects of the kind model"),
        (lambda model, optimizer, loader, schedule: (model, optimizer), "0 objects of the kind loader"),
        (lambda model, optimizer, loader, schedule: (schedule,), "a schedule without its optimizer"),
        (lambda model, optimizer, loader, schedule: (model, model, optimizer, loader), "2 objects of the kind model"),
    ],
)
def test_what_prepare_cannot_make_elastic_is_refused(chosen: Any, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        alone(lambda: Accelerator(cpu=True).prepare(*chosen(*parts())))


def test_other_loaders_are_read_whole() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader, _ = parts()
    other = DataLoader(loader.dataset, batch_size=20)
    *_, prepared = alone(lambda: accelerator.prepare(model, optimizer, loader, other))
    sizes = [len(accelerator.gather_for_metrics(y)) for _, y in prepared]
    assert sizes == [20, 20, 5]
    assert [len(y) for _, y in accelerator.prepare(other)] == sizes


def test_a_plain_range_of_epochs_is_refused() -> None:
    *_, loader, _ = alone(lambda: Accelerator(cpu=True).prepare(*parts()))
    with pytest.raises(UsageError, match=r"loader\.epochs"):
        next(iter(loader))


def test_registered_objects_are_part_of_the_state() -> None:
    accelerator = Accelerator(cpu=True)
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))
    accelerator.register_for_checkpointing(average)
    *_, loader, _ = alone(lambda: accelerator.prepare(*parts()))
    assert average in loader._loader._settings.state.values()
    with pytest.raises(UsageError, match="call it before"):
        accelerator.register_for_checkpointing(average)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_lowest_rank_prints_and_saves(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.is_main_process
    trained(accelerator)
    monkeypatch.setattr(SoloSession, "view", replace(SoloSession.view, workers=(0, 7) if rank == 0 else (7, 0)))
    accelerator.print("printed")
    accelerator.save_model(nn.Linear(2, 2), str(tmp_path / "saved"))
    accelerator.save({"a": 1}, tmp_path / "object")
    assert accelerator.is_local_main_process == accelerator.is_main_process == (rank == 0)
    assert ("printed" in capsys.readouterr().out) == (rank == 0)
    assert (tmp_path / "saved" / "model.safetensors").exists() == (rank == 0)
    assert (tmp_path / "object").exists() == (rank == 0)
    monkeypatch.undo()
    assert accelerator.is_main_process


def test_a_worker_that_joins_when_training_is_over_writes_no_files() -> None:
    def train(accelerator: Accelerator, writers: list[bool]) -> None:
        model, optimizer, loader, _ = accelerator.prepare(*parts())
        for _ in loader.epochs(1):
            for x, y in loader:
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        writers.append(accelerator.is_main_process)

    writers: list[bool] = []
    train_and_join_late(lambda: train(Accelerator(), writers), lambda: train(Accelerator(), writers))
    assert writers == [True, False]
