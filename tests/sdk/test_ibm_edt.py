"""IBM's FabricModel: the bits of ElasticModel, every generation of its interface, and what is refused."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from resile.integrations.ibm_edt import activate, parameters
from resile.integrations.ibm_edt.callbacks import Callback, Logged, Withheld, log
from resile.integrations.ibm_edt.fabric_model import FabricModel
from resile.integrations.ibm_edt.logs import ELog, EMetrics
from resile.integrations.ibm_edt.progress import FabricProgress
from resile.integrations.ibm_edt.training import load_datasets
from resile.job_options import COMPAT_MODULES, worker_environment
from resile.training import ElasticModel, seed
from resile_shared.errors import UsageError


@pytest.fixture(autouse=True)
def as_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RESULT_DIR", str(tmp_path / "results"))
    monkeypatch.setenv("LOG_DIR", str(tmp_path / "logs"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def alone(call: Callable[[], Any]) -> Any:
    """Run ``call`` as a script of its own, with its one training call."""
    return Context().run(call)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    x = torch.randn(45, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[:33], (x[:33].sum(1) > 0).long()), TensorDataset(x[33:], (x[33:].sum(1) > 0).long())


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def fabric(*positional: Any, loss: Any = F.cross_entropy, **more: Any) -> Any:
    """Train a FabricModel; positional arguments are those of its train()."""
    ours = ("checkpoint_freq", "validation_freq", "worker_num", "worker_device_num", "worker_memory", "threads")
    of_train = {name: more.pop(name) for name in ours if name in more}

    def run() -> Any:
        model, optimizer = parts()
        return FabricModel(model, datasets, loss, optimizer, **more).train(*positional, **of_train)

    return alone(run)


def test_the_bits_are_those_of_elastic_model() -> None:
    def elastic() -> Any:
        model, optimizer = parts()
        return ElasticModel(model, datasets, F.cross_entropy, optimizer).train(epochs=3, batch_size=12, num_shards=4)

    expected = alone(elastic).params_sha256
    assert fabric(3, 3, 4).params_sha256 == expected
    assert fabric(3, 3, 4, 2).params_sha256 == expected
    assert fabric(3, 3, 4, 0, 1, 1).params_sha256 == expected
    assert fabric(3, 3, worker_num=2, worker_device_num=2).params_sha256 == expected
    assert fabric(3, 3, 4, fn_step_train=own_step).params_sha256 == expected


def own_step(model: Any, data: Any, eva: Any, loader: Any, arguments: Any) -> tuple[float, Any]:
    inputs, targets = data
    model.get_optimizer().zero_grad()
    outputs = model(inputs)
    loss = model.get_loss_function()(outputs, targets)
    loss.backward()
    return eva(outputs, targets), loss


def test_a_fourth_argument_alone_is_how_often_parameters_are_saved(tmp_path: Path) -> None:
    fabric(3, 3, 4, 2)
    names = {path.name for path in (tmp_path / "results/model/train").iterdir()}
    assert names == {f"model_epoch_{name}{more}.pth" for name in ("2", "final") for more in ("", "_optimizer_state")}


@pytest.mark.parametrize(("every", "steps"), [(2, [22, 33]), (10, [33]), (0, [])])
def test_a_validation_follows_as_many_epochs_and_the_last(every: int, steps: list[int], tmp_path: Path) -> None:
    fabric(3, 3, 4, validation_freq=every)
    assert [test["steps"] for test in json.loads((tmp_path / "results/val_dict_list.json").read_text())] == steps
    lines = [json.loads(line) for line in (tmp_path / "logs/evaluation-metrics.txt").open()]
    assert [int(line["etimes"]["iteration"]["value"]) for line in lines if line["grouplabel"] == "test"] == steps


class Recorder(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_epoch_begin(self, epoch: int) -> None:
        self.calls.append(("begin", epoch, self.params["epochs"], self.model.training))

    def on_epoch_end(self, epoch: int, save_model: bool = False) -> None:
        self.calls.append(("end", epoch, save_model))


def test_callbacks_are_called_once_an_epoch_and_on_other_workers_unheard(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder()
    fabric(2, 3, 4, user_callback=[recorder])
    assert [call[:2] for call in recorder.calls] == [("begin", 0), ("end", 0), ("begin", 1), ("end", 1)]

    withheld = Withheld()
    with withheld.hold():
        print("once")
        with ELog.open() as file:
            file.recordText("one line")
    assert capsys.readouterr().out == ""
    before = Path(os.environ["LOG_DIR"], "stdout").read_text()
    assert "one line" not in before
    withheld.release()
    assert capsys.readouterr().out == "once\n"
    assert Path(os.environ["LOG_DIR"], "stdout").read_text().endswith("one line\n")


def test_callbacks_that_differ_between_workers_are_refused() -> None:
    """Here each worker is one object: what a second one knew would be another mean of the digests."""
    callback, elsewhere = Recorder(), Recorder()
    mine, other = FabricProgress(lambda: [callback]), FabricProgress(lambda: [elsewhere])
    for progress in (mine, other):
        progress.callbacks.begin()
    mine.check(0.3 * mine.digest() + 0.7 * other.digest())
    callback.calls.append(time.time())
    callback.epoch, callback.at = 1, 2  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="the state of callbacks differs between workers"):
        mine.check(0.3 * mine.digest() + 0.7 * other.digest())
    elsewhere.at = 0  # type: ignore[attr-defined]
    other.load_state_dict(mine.state_dict())
    mine.check(0.3 * mine.digest() + 0.7 * other.digest())


class First:
    def log_train_metrics(self, loss: float, acc: float, completed_batch: int, worker: int = 0) -> None:
        self.told = (loss, acc, completed_batch, worker)


class Second:
    def log_train_metrics(self, metrics: Any, completed_batch: int, epoch: int, worker: int = 0) -> None:
        self.told = (metrics, completed_batch, epoch, worker)


class Third:
    def log_train_metrics(self, metrics: Any, iteration: int, epoch: int, workers: int) -> None:
        self.told = (metrics, iteration, epoch, workers)


class Shorter:
    def log_train_metrics(self, values: Any, step: int) -> None:
        self.told = (values, step)


class Several:
    def log_train_metrics(self, *values: Any, **named: Any) -> None:
        self.told = values


@pytest.mark.parametrize(
    ("logger", "told"),
    [
        (First(), (0.5, 90.0, 16, 2)),
        (Second(), ({"loss": 0.5, "accuracy": 90.0}, 16, 1, 2)),
        (Third(), ({"loss": 0.5, "accuracy": 90.0}, 16, 1, 3)),
        (Shorter(), ({"loss": 0.5, "accuracy": 90.0}, 16)),
        (Several(), ({"loss": 0.5, "accuracy": 90.0}, 16, 1, 2)),
    ],
)
def test_loggers_of_all_generations_are_told_the_same(logger: Any, told: Any) -> None:
    log(logger, "log_train_metrics", Logged({"loss": 0.5, "accuracy": 90.0}, 16, 1, 2, 3))
    log(logger, "log_test_metrics", Logged({"loss": 0.5}, 16, 1, 2, 3))
    assert logger.told == told


def test_metrics_are_lines_with_types(tmp_path: Path) -> None:
    with EMetrics.open("trial") as file:
        file.record(EMetrics.TEST_GROUP, 3, {"accuracy": 0.5, "right": 4, "note": "good", "loss": torch.tensor(0.25)})
    line = json.loads((tmp_path / "logs/trial/evaluation-metrics.txt").read_text())
    assert line["grouplabel"] == "test"
    assert line["etimes"]["iteration"] == {"type": 2, "value": "3"}
    assert line["values"] == {
        "accuracy": {"type": 3, "value": "0.5"},
        "right": {"type": 2, "value": "4"},
        "note": {"value": "good"},
        "loss": {"type": 3, "value": "0.25"},
    }
    assert json.loads((tmp_path / "results/val_dict_list.json").read_text())[0]["steps"] == 3


def step(*lines: str) -> Any:
    """A step of the script's own, after the loss is known; the last line returns."""
    body = "".join(f"    {line}\n" for line in lines)
    names: dict[str, Any] = {"nn": nn}
    exec(f"def own(model, data, eva, loader, arguments):\n    loss = model(data[0]).square().mean()\n{body}", names)
    return names["own"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"keras_custom_objects": {}}, "Resile trains PyTorch"),
        ({"save_to_onnx": True}, "needs onnx and onnxscript: start the script with --with onnx --with onnxscript"),
        ({"metrics": ["auc"]}, "the metric 'auc': give functions"),
        ({"loss": "mse"}, "'mse' as its loss_function"),
        ({"loss": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="sum")}, "is a sum"),
        ({"fp16": True}, "does not take fp16"),
        ({"threads": 4}, "does not take threads"),
        ({"checkpoint_freq": -1}, "checkpoint_freq=-1: use a whole number from 0 up"),
        ({"fn_step_train": step("return 0.0, loss")}, "called backward\\(\\) 0 times"),
        ({"fn_step_train": step("loss.backward()", "return loss")}, "has to return two things"),
        ({"fn_step_train": step("loss.backward()", "loss.backward()", "return 0.0, loss")}, "backward\\(\\) 2 times"),
        (
            {"fn_step_train": step("loss.backward()", "model.get_optimizer().step()", "return 0.0, loss")},
            "optimizer",
        ),
        (
            {"fn_step_train": step("loss.backward()", "nn.utils.clip_grad_norm_([], 1.0)", "return 0.0, loss")},
            "clips gradients",
        ),
    ],
)
def test_what_cannot_hold_is_refused_by_name(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fabric(1, 3, 4, **more)


def test_engines_must_be_named_and_hardware_has_no_effect() -> None:
    with pytest.raises(UsageError, match="without engines_number"):
        fabric(1, 3)
    with pytest.warns(UserWarning, match="worker_memory: without effect"):
        fabric(1, 3, 4, worker_memory="8g")


def test_the_platforms_parameters_are_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["main.py", "--epochs", "7", "--more"])
    assert parameters.getEpoch() == 7
    monkeypatch.setattr("sys.argv", ["main.py"])
    with pytest.raises(UsageError, match="--env EDT_EPOCHS="):
        parameters.getEpoch()
    for name, value in {
        "EDT_EPOCHS": "3",
        "EDT_BATCH_SIZE": "16",
        "EDT_OPTIMIZER": "SGD",
        "EDT_LEARNING_RATE": "0.5",
        "EDT_MOMENTUM": "0.9",
        "DATA_DIR": "/data",
        "EDT_TEST_DATA": "/test",
    }.items():
        monkeypatch.setenv(name, value)
    optimizer = parameters.getOptimizer(nn.Linear(1, 1))
    assert (parameters.getEpoch(), parameters.getTrainBatchSize(), parameters.getTestBatchSize()) == (3, 16, 16)
    assert (parameters.getTrainData(False), parameters.getTestData(False)) == ("/data", "/test")
    assert parameters.getLearningRate(optimizer) == 0.5
    assert optimizer.defaults["momentum"] == 0.9
    monkeypatch.setenv("EDT_OPTIMIZER", "adam")
    with pytest.raises(UsageError, match="adam has no momentum"):
        parameters.getOptimizer(nn.Linear(1, 1))


def test_a_scripts_own_modules_come_before_those_of_the_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path), "/usr/lib/python3"])
    monkeypatch.setenv("RESILE_OUTPUT_DIR", str(tmp_path / "output"))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.pop("DATA_DIR", None)
    alone(lambda: activate({"LOG_DIR": str(tmp_path / "logs")}))
    import sys

    assert sys.path[0] == str(tmp_path)
    assert sys.path[1].endswith("ibm_edt/modules")
    assert os.environ["RESULT_DIR"] == str(tmp_path / "output")
    assert os.environ["LOG_DIR"] == str(tmp_path / "logs")  # is the job's
    assert os.environ["DATA_DIR"] == str(tmp_path)
    assert (tmp_path / "output").is_dir()


def test_one_worker_downloads_and_the_others_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    downloads = 0
    first = Event()

    def download() -> tuple[str, None]:
        nonlocal downloads
        first.set()
        if not (tmp_path / "data").exists():
            downloads += 1
            time.sleep(0.1)  # so that one that did not wait would download, too
            (tmp_path / "data").touch()
        return "data", None

    others = [Thread(target=lambda: (first.wait(), load_datasets(download))) for _ in range(3)]
    for thread in others:
        thread.start()
    load_datasets(download)
    for thread in others:
        thread.join()
    assert downloads == 1


def test_the_command_names_the_module_to_the_workers() -> None:
    assert worker_environment({"A": "1"}, "ibm-edt") == {"A": "1", "RESILE_COMPAT": "resile.integrations.ibm_edt"}
    with pytest.raises(UsageError, match="there is no interface horovod: use ibm-edt"):
        worker_environment({}, "horovod")
    assert COMPAT_MODULES["ibm-edt"] == activate.__module__.rpartition(".")[0]
