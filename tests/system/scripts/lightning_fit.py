"""An ElasticTrainer of Lightning with all that a joiner has to be told: callbacks, metrics, schedules, scores."""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from resile.integrations.lightning import ElasticTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="one-cycle", choices=["one-cycle", "epoch", "plateau"])
parser.add_argument("--folder", default=tempfile.gettempdir())
parser.add_argument("--kill", type=Path, help="a file; the worker that creates it kills itself")
options = parser.parse_args()

SAMPLES, LAST, KILLED_AT = 150, 33, 14


class Data(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        x = torch.randn(SAMPLES + 40, 4, generator=torch.Generator().manual_seed(0))
        self.all = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(self.all, range(SAMPLES)), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(torch.utils.data.Subset(self.all, range(SAMPLES, SAMPLES + 40)), batch_size=16)


class Classifier(lightning.LightningModule):
    def __init__(self, rate: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        self.seen = SumMetric()
        self.scores = MetricCollection([MulticlassAccuracy(2), MulticlassPrecision(2)], prefix="train_")
        self.validation_accuracy = MulticlassAccuracy(2)
        self.history: list[float] = []
        self.extra = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        outputs = self.layers(x)
        loss = nn.functional.cross_entropy(outputs, y)
        self.seen.update(float(len(x)))
        self.scores.update(outputs, y)
        self.log_dict(self.scores, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("samples", float(len(x)), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss, "outputs": outputs}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        outputs = self.layers(x)
        self.validation_accuracy(outputs, y)
        self.log("val_loss", nn.functional.cross_entropy(outputs, y))
        self.log("val_accuracy", self.validation_accuracy)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.history.append(float(self.trainer.callback_metrics["val_loss"]))

    def on_train_epoch_end(self) -> None:
        steps = self.trainer.global_step
        is_whole = steps % self.trainer.num_training_batches == 0
        assert self.trainer.callback_metrics["samples"] == self.seen.compute()
        assert self.seen.compute() == (SAMPLES if is_whole else 16 * (steps % self.trainer.num_training_batches))
        self.seen.reset()
        self.log("epochs", float(self.current_epoch))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.extra = checkpoint["extra"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)
        if options.schedule == "one-cycle":
            steps = self.trainer.estimated_stepping_batches
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        if options.schedule == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss_epoch"}


class Milestones(lightning.Callback):
    """Ends training after 33 steps of its own count, and lets the weight decay jump after 20."""

    def __init__(self) -> None:
        self.steps = 0
        self.pid = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.pid = os.getpid()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.pid == os.getpid()
        self.steps += 1
        module.extra += 2
        assert self.steps == trainer.global_step
        assert module.extra == 2 * self.steps
        torch.testing.assert_close(outputs["loss"], trainer.callback_metrics["loss_step"])
        if self.steps == 20:
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1
        if self.steps == LAST:
            trainer.should_stop = True
        if trainer.is_global_zero and options.kill and self.steps == KILLED_AT and not options.kill.exists():
            options.kill.touch()
            os.kill(os.getpid(), signal.SIGKILL)


lightning.seed_everything(0)
module = Classifier()
milestones, stopping = Milestones(), EarlyStopping("val_loss", patience=30)
checkpoints = ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)
trainer = ElasticTrainer(
    max_epochs=4,
    accumulate_grad_batches=2,
    num_shards=4,
    gradient_clip_val=1.0,
    val_check_interval=8,
    log_every_n_steps=3,
    logger=[TensorBoardLogger(options.folder), CSVLogger(options.folder)],
    callbacks=[stopping, checkpoints, LearningRateMonitor(), milestones],
    enable_progress_bar=False,
    enable_model_summary=False,
    accelerator="cpu",
)
trainer.fit(module, datamodule=Data())
assert milestones.steps == trainer.global_step == LAST
assert len(module.history) == 7, module.history
assert float(checkpoints.best_model_score) == min(module.history) == float(stopping.best_score)
assert stopping.wait_count == 6 - module.history.index(min(module.history))
if trainer.is_global_zero:
    best = torch.load(checkpoints.best_model_path, weights_only=True)
    assert best["state_dict"].keys() == module.state_dict().keys()
    assert len(checkpoints.best_k_models) == 2
assert trainer.validate(module, datamodule=trainer.datamodule, verbose=False)[0]["val_accuracy"] > 0.5
