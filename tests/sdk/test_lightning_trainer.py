"""ElasticTrainer of Lightning: what a Trainer computes, and every argument and callback either works or is refused."""

import warnings
from collections.abc import Callable, Iterator
from contextvars import Context
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MaxMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassRecall

from resile.integrations.lightning import ElasticTrainer
from resile.integrations.lightning.arguments import _TAKEN, DEFAULTS, REFUSED_CALLBACKS
from resile.integrations.lightning.metric_states import MetricStates
from resile.integrations.lightning.progress import FitProgress
from resile.integrations.lightning.strategy import WorkerStrategy
from resile_learner.state.flat import flatten, unflatten
from resile_shared.errors import UsageError

from .late_joiner import train_and_join_late

ELASTIC = {"num_shards", "seed", "checkpoint_every", "threads"}
KEPT = """
    logger callbacks fast_dev_run max_epochs min_epochs max_steps min_steps limit_val_batches limit_test_batches
    limit_predict_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps
    enable_checkpointing enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val
    gradient_clip_algorithm deterministic inference_mode use_distributed_sampler detect_anomaly barebones
    default_root_dir enable_autolog_hparams
"""
"""Arguments that an elastic run keeps, or that concern processes which it does not have."""
KEPT_CALLBACKS = """
    BasePredictionWriter Callback Checkpoint DeviceStatsMonitor EarlyStopping LambdaCallback LearningRateMonitor
    ModelCheckpoint ModelSummary OnExceptionCheckpoint ProgressBar RichModelSummary RichProgressBar TQDMProgressBar
"""
REFUSED_WITH_THEIR_BASE = {"BackboneFinetuning"}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plain Trainer takes all cores, which other tests need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(before)


class Net(lightning.LightningModule):
    """Logs and steps as most modules do."""

    def __init__(self, schedule: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.accuracy = MulticlassAccuracy(2, average="micro")
        self.several = MetricCollection([MulticlassAccuracy(2, average="macro"), MulticlassRecall(2)], prefix="m_")
        self.schedule = schedule
        self.rates: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        outputs = self.layers(x)
        loss = nn.functional.cross_entropy(outputs, y)
        self.accuracy(outputs, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.several(outputs, y)
        self.log_dict(self.several, on_epoch=True, on_step=False)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"positive": y.float().mean()}, on_step=False, on_epoch=True)
        self.log("count", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("weighted", x.mean(), on_step=False, on_epoch=True, batch_size=int(y.sum()) + 1)
        return {"loss": loss}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y), prog_bar=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedules = torch.optim.lr_scheduler
        if self.schedule == "step":
            steps = self.trainer.estimated_stepping_batches
            schedule = schedules.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
        if self.schedule == "epoch":
            return [optimizer], [schedules.ExponentialLR(optimizer, 0.5)]
        if self.schedule == "several":
            slow = {"scheduler": schedules.StepLR(optimizer, 1, 0.9), "interval": "step", "frequency": 2}
            return [optimizer], [slow, schedules.ExponentialLR(optimizer, 0.5)]
        if self.schedule == "plateau":
            plateau = schedules.ReduceLROnPlateau(optimizer, threshold=1.0, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}
        return [optimizer] if self.schedule == "list" else optimizer


def samples(size: int = 50) -> TensorDataset:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())


def loader(**more: Any) -> DataLoader[Any]:
    return DataLoader(samples(), **{"batch_size": 16, **more})


def trainer_of(kind: type, folder: Path, **more: Any) -> Any:
    usual = {"max_epochs": 2, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return kind(default_root_dir=folder, **{**usual, "logger": False, "enable_checkpointing": False, **more})


def alone(call: Callable[[], Any]) -> Any:
    """Run ``call`` as a script of its own, with its one training call."""
    return Context().run(call)


@pytest.mark.parametrize(
    ("more", "schedule"),
    [
        ({}, "none"),
        ({"gradient_clip_val": 0.1, "check_val_every_n_epoch": 2}, "list"),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, "step"),
        ({"max_steps": 6, "val_check_interval": 2}, "epoch"),
        ({"max_epochs": 3, "val_check_interval": 0.5}, "several"),
        ({"max_epochs": 4}, "plateau"),
        ({"precision": "64-true"}, "none"),
        ({"fast_dev_run": 3}, "none"),
        ({"max_epochs": None, "max_steps": 5}, "step"),
        ({"max_epochs": 3, "min_epochs": 2, "callbacks": "stops early"}, "none"),
    ],
)
def test_a_plain_run_computes_and_logs_what_a_trainer_does(more: dict[str, Any], schedule: str, tmp_path: Path) -> None:
    found = []
    for kind, options in ((lightning.Trainer, {}), (ElasticTrainer, {"num_shards": 4})):
        module, own = Net(schedule), {**more}
        if "callbacks" in own:
            own["callbacks"] = [EarlyStopping("val_loss", mode="max", patience=1)]
        trainer = trainer_of(kind, tmp_path, **own, **options)
        alone(lambda t=trainer, m=module: t.fit(m, loader(), loader(batch_size=50)))
        found.append((trainer, module))
    (usual, expected), (elastic, module) = found
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert module.rates == pytest.approx(expected.rates)
    assert (elastic.global_step, elastic.current_epoch) == (usual.global_step, usual.current_epoch)
    logged, wanted = elastic.callback_metrics, usual.callback_metrics
    assert logged.keys() == wanted.keys()
    for name in wanted.keys() - {"weighted"}:
        assert float(logged[name]) == pytest.approx(float(wanted[name]), rel=1e-4, abs=1e-5), name


def test_accumulated_batches_are_one_global_batch(tmp_path: Path) -> None:
    """As Lightning's, as long as its last group of an epoch is complete: it divides the others by too much."""
    modules = []
    for kind, accumulated in ((lightning.Trainer, 1), (ElasticTrainer, 2)):
        module = Net("step")
        data = loader(batch_size=20 // accumulated, drop_last=True)
        trainer = trainer_of(kind, tmp_path, accumulate_grad_batches=accumulated)
        alone(lambda t=trainer, m=module, d=data: t.fit(m, d))
        assert trainer.global_step == 4
        modules.append(module)
    for expected, parameter in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


def test_every_argument_is_kept_or_refused() -> None:
    assert DEFAULTS.keys() - {"self"} == set(KEPT.split()) | _TAKEN.keys()
    assert not set(KEPT.split()) & _TAKEN.keys()


def test_every_callback_is_kept_or_refused() -> None:
    refused = {kind.__name__ for kind in REFUSED_CALLBACKS}
    assert set(callbacks.__all__) == set(KEPT_CALLBACKS.split()) | refused | REFUSED_WITH_THEIR_BASE


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"devices": 4}, "devices=4: the number of workers is the pool's"),
        ({"devices": [0, 1]}, "devices"),
        ({"strategy": "ddp"}, "strategy='ddp'"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"accelerator": "tpu"}, "accelerator='tpu'"),
        ({"precision": "16-mixed"}, "use precision='bf16-mixed'"),
        ({"plugins": [object()]}, "plugins"),
        ({"max_time": "00:00:10:00"}, "max_time"),
        ({"val_check_interval": timedelta(minutes=1)}, "count epochs or steps instead"),
        ({"val_check_interval": 3, "accumulate_grad_batches": 2}, "a multiple of accumulate_grad_batches"),
        ({"limit_train_batches": 10}, "Subset"),
        ({"limit_train_batches": 1}, "Subset"),
        ({"overfit_batches": 1}, "Subset"),
        ({"profiler": "simple"}, "profiler"),
        ({"benchmark": True}, "benchmark"),
        ({"sync_batchnorm": True}, "sync_batchnorm"),
        ({"reload_dataloaders_every_n_epochs": 1}, "set_epoch"),
        ({"model_registry": "models"}, "model_registry"),
    ],
)
def test_arguments_that_cannot_hold_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        ElasticTrainer(**more)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Counts(Net):
    batches = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.batches += 1
        return super().training_step(batch, batch_idx)


class Collects(Net):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.outputs.append(result["loss"].detach())
        return result


class Averages(Net):
    """A running average of the losses of this worker's shards: a new tensor in each, or one that is written to."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.writes = writes
        self.average = torch.tensor(0.7)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        loss = result["loss"].detach()
        if self.writes:
            self.average.lerp_(loss, 0.1)
        else:
            self.average = 0.9 * self.average + 0.1 * loss
        return result


class Remembering(nn.Linear):
    """A layer with attributes that belong to one shard, caches, or, if it ``counts``, a counter."""

    def __init__(self, *, counts: bool) -> None:
        super().__init__(4, 4)
        self.counts = counts
        self.calls = 0
        self.has_run = False
        self.penalty = self.activations = torch.zeros(())
        self.mask = torch.zeros(1)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.has_run = True
        self.penalty = outputs.square().mean()
        self.activations = outputs.detach()
        self.mask = torch.ones(3, 3).triu()
        if self.counts:
            self.calls += 1
        return outputs


class Layered(Net):
    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.layers.insert(0, Remembering(counts=counts))


class Skips(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return None


class Gathers(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": self.trainer.strategy.all_gather(super().training_step(batch, batch_idx)["loss"]).mean()}


class LogsMaximum(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("largest", batch[0].max(), reduce_fx="max", on_epoch=True)
        return super().training_step(batch, batch_idx)


class LogsSometimes(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch[0].sum() > 0:
            self.log("sometimes", 1.0)
        return super().training_step(batch, batch_idx)


class Curve(Net):
    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.curve = metric

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.curve.update(torch.sigmoid(self.layers(batch[0])[:, 0]), batch[1])
        return super().training_step(batch, batch_idx)


class Largest(Net):
    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.largest.update(batch[0])
        return super().training_step(batch, batch_idx)


class UsesBatch(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch[0].mean()


class UsesOutputs(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        outputs["predictions"].mean()


class SkipsEpoch(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1


class NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class ManySteps(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class TwoLosses(Net):
    def backward(self, loss: Tensor, *arguments: Any, **more: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class Summed(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1], reduction="sum")


class EveryOtherStep(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


@pytest.mark.parametrize(
    ("fit", "named"),
    [
        (lambda make: make().fit(Manual(), loader()), "manual optimization .* resile.training.prepare"),
        (lambda make: make().fit(Counts(), loader()), r"training_step changed self.batches"),
        (lambda make: make().fit(Collects(), loader()), r"training_step changed self.outputs"),
        (lambda make: make().fit(Averages(), loader()), "training_step changed self.average"),
        (lambda make: make().fit(Averages(writes=True), loader()), "training_step changed self.average"),
        (lambda make: make().fit(Layered(counts=True), loader()), "training_step changed self.layers.0.calls"),
        (lambda make: make().fit(Skips(), loader()), "training_step returned None"),
        (lambda make: make().fit(Gathers(), loader()), r"all_gather\(\) was called in training_step"),
        (lambda make: make().fit(LogsMaximum(), loader()), "reduce_fx='max'"),
        (lambda make: make().fit(LogsSometimes(), loader()), "for some shards of a batch and not for others"),
        (lambda make: make().fit(Curve(BinaryAUROC()), loader()), "'curve' .BinaryAUROC.* is not a sum"),
        (lambda make: make().fit(Curve(BinaryAUROC(thresholds=2000)), loader()), "8000 elements"),
        (lambda make: make().fit(Largest(), loader()), "'largest' .MaxMetric"),
        (lambda make: make().fit(UsesBatch(), loader()), "used the batch"),
        (lambda make: make().fit(UsesOutputs(), loader()), "used outputs\\['predictions'\\]"),
        (lambda make: make().fit(SkipsEpoch(), loader()), "returned -1"),
        (lambda make: make().fit(NoOptimizer(), loader()), "returned None: return an optimizer"),
        (lambda make: make().fit(ManySteps(), loader()), "returned LBFGS"),
        (lambda make: make().fit(TwoLosses(), loader()), "2 times"),
        (lambda make: make().fit(Summed(), loader()), "a sum over its batch"),
        (lambda make: make().fit(EveryOtherStep(), loader()), r"without optimizer.step\(\)"),
        (lambda make: make().fit(Net(), [loader(), loader()]), "the training loader is a list"),
        (lambda make: make().fit(Net(), DataLoader(Stream(), batch_size=4)), "Stream"),
        (lambda make: make().fit(Net(), loader(), ckpt_path="epoch=1.ckpt"), "ckpt_path is 'epoch=1.ckpt'"),
        (lambda make: make().fit(Net(), loader(), ckpt_path="last"), "in a plain run"),
        (lambda make: make().fit(torch.compile(Net()), loader()), "compiled"),
        (lambda make: make(max_epochs=-1).fit(Net(), loader()), "max_epochs is -1"),
        (lambda make: make(val_check_interval=9).fit(Net(), loader(), loader()), "val_check_interval is 9"),
        (lambda make: make(callbacks=[callbacks.Timer()]).fit(Net(), loader()), "the callback Timer"),
        (lambda make: make(callbacks=[callbacks.BackboneFinetuning()]).fit(Net(), loader()), "freezes or unfreezes"),
        (
            lambda make: make(
                enable_checkpointing=True, callbacks=[ModelCheckpoint(train_time_interval=timedelta(minutes=1))]
            ).fit(Net(), loader()),
            "train_time_interval",
        ),
    ],
)
def test_what_cannot_work_is_refused(fit: Callable[[Any], Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"(?s){named}"):
        alone(lambda: fit(lambda **more: trainer_of(ElasticTrainer, tmp_path, num_shards=4, **more)))


def test_what_one_shard_leaves_in_a_module_and_what_is_a_cache_is_no_mistake(tmp_path: Path) -> None:
    trainer = trainer_of(ElasticTrainer, tmp_path, num_shards=4)
    alone(lambda: trainer.fit(Layered(counts=False), loader()))
    assert trainer.result is not None


def test_a_curve_with_thresholds_is_that_of_all_samples(tmp_path: Path) -> None:
    module = Curve(BinaryAUROC(thresholds=5))
    alone(lambda: trainer_of(ElasticTrainer, tmp_path, num_shards=4, max_epochs=1).fit(module, loader()))
    assert module.curve.confmat.sum() == 50 * 5


class Averaged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.layers, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.layers)


def test_an_average_of_weights_may_be_part_of_the_module(tmp_path: Path) -> None:
    """And samples may be read by processes."""
    modules = []
    for kind, options in ((lightning.Trainer, {}), (ElasticTrainer, {"num_shards": 4})):
        module = Averaged()
        trainer = trainer_of(kind, tmp_path, **options)
        alone(lambda t=trainer, m=module: t.fit(m, loader(num_workers=1)))
        modules.append(module)
    assert modules[1].average.n_averaged == 8
    for expected, parameter in zip(*(module.average.parameters() for module in modules), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)


class Notes(lightning.Callback):
    def __init__(self) -> None:
        self.steps = [0]
        self.where = ""


def in_training(folder: Path, name: str) -> tuple[Any, Any, FitProgress, list[Any]]:
    """A trainer that is about to train."""
    module, notes = Net(), Notes()
    notes.where = name
    stopping, checkpoint = EarlyStopping("val_loss"), ModelCheckpoint(monitor="val_loss", dirpath=folder / name)
    own = [stopping, checkpoint, notes]
    logger = CSVLogger(folder)
    trainer = trainer_of(ElasticTrainer, folder, callbacks=own, enable_checkpointing=True, logger=logger)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=loader())
    trainer.state.fn = "fit"
    trainer.training = True
    return trainer, module, FitProgress(trainer, MetricStates(module)), own


def test_a_joiner_knows_what_the_others_have_logged_counted_and_noted(tmp_path: Path) -> None:
    """But not what they noted when their own worker began."""
    donor, module, progress, (stopping, checkpoint, notes) = in_training(tmp_path, "donor")
    progress.begin()
    donor.loggers[0]._version = 7
    stopping.wait_count, checkpoint.best_model_score, notes.steps[0] = 2, torch.tensor(0.25), 5
    checkpoint._last_global_step_saved = 9
    module.rates.append(0.5)
    module._current_fx_name = "training_step"
    donor._logger_connector.on_batch_start(None)
    for value, size in ((1.0, 3), (4.0, 1)):
        module.log("loss", torch.tensor(value), on_step=True, on_epoch=True, batch_size=size)
    module.accuracy.update(torch.tensor([[1.0, 0.0]] * 4), torch.tensor([0, 0, 0, 1]))
    module.log("accuracy", module.accuracy, on_epoch=True, on_step=False)
    donor.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 11
    donor.fit_loop.epoch_loop._batches_that_stepped = 11
    progress.begun, progress.epoch, donor.should_stop = 10, 1, True
    state = flatten(progress.state_dict())

    joiner, module, progress, (stopping, checkpoint, notes) = in_training(tmp_path, "joiner")
    progress.load_state_dict(unflatten(state.skeleton, state.tensors))
    assert stopping.wait_count == 0
    progress.begin()
    assert (stopping.wait_count, checkpoint.best_model_score, notes.steps, notes.where) == (2, 0.25, [5], "joiner")
    assert Path(checkpoint.dirpath).name == "donor"
    assert checkpoint._last_global_step_saved == 9
    assert module.rates == [0.5]
    assert joiner.loggers[0].version == 7
    assert (joiner.global_step, joiner.should_stop, progress.begun, progress.epoch) == (11, True, 10, 1)
    joiner._logger_connector.epoch_end_reached()
    found = {name: float(value) for name, value in joiner.callback_metrics.items()}
    assert found["loss_epoch"] == (1.0 * 3 + 4.0) / 4
    assert found["accuracy"] == 0.75


def test_only_the_lowest_rank_writes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_rank = WorkerStrategy._set_rank
    monkeypatch.setattr(WorkerStrategy, "_set_rank", lambda strategy, rank: set_rank(strategy, 1))
    try:
        checkpoint = ModelCheckpoint(dirpath=tmp_path / "checkpoints")
        more = {"logger": CSVLogger(tmp_path), "callbacks": [checkpoint], "enable_checkpointing": True}
        trainer = trainer_of(ElasticTrainer, tmp_path, **more, log_every_n_steps=1)
        assert not trainer.is_global_zero
        alone(lambda: trainer.fit(Net(), loader(), loader()))
        assert not [file for file in tmp_path.rglob("*") if file.is_file()]
        assert checkpoint.best_model_path
    finally:
        set_rank(trainer.strategy, 0)


def test_what_the_lost_worker_has_not_written_is_written_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(ElasticTrainer, tmp_path)
    strategy, files = trainer.strategy, [tmp_path / "old.ckpt", tmp_path / "new.ckpt"]
    files[0].touch()
    strategy._is_known, strategy.global_rank = True, 1
    strategy.save_checkpoint({"step": 1}, tmp_path / "earlier.ckpt")
    strategy.on_exchange()
    strategy.save_checkpoint({"step": 2}, files[1])
    strategy.remove_checkpoint(files[0])
    assert list(tmp_path.iterdir()) == files[:1]
    assert alone(strategy.follow_rank)
    assert list(tmp_path.iterdir()) == files[1:]


def test_rows_of_another_worker_stay(tmp_path: Path) -> None:
    first = CSVLogger(tmp_path, version=0)
    first.log_metrics({"loss": 1.0}, step=1)
    first.save()
    trainer = trainer_of(ElasticTrainer, tmp_path, logger=CSVLogger(tmp_path, version=0))
    trainer.strategy._is_known, trainer.strategy.global_rank = True, 1
    trainer.follow_rank(has_begun=True)
    trainer.logger.log_metrics({"loss": 0.5, "accuracy": 1.0}, step=2)
    trainer.logger.save()
    rows = Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()
    assert rows == ["accuracy,loss,step", ",1.0,1", "1.0,0.5,2"]


class Phases(Notes):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.where = "here"

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.steps[0] += 1

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert self.where == "here"


def test_callbacks_of_a_worker_that_joins_when_training_is_over_know_all_the_same(tmp_path: Path) -> None:
    modules, notes = (Net(), Net()), (Phases(), Phases())
    donor, joiner = (
        trainer_of(ElasticTrainer, tmp_path / str(number), callbacks=[each]) for number, each in enumerate(notes)
    )
    train_and_join_late(lambda: donor.fit(modules[0], loader()), lambda: joiner.fit(modules[1], loader()))
    assert notes[0].steps == notes[1].steps == [8]
    assert modules[0].rates == modules[1].rates
    assert joiner.global_step == 8
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))
