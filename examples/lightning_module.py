"""Lightning's Trainer, elastic: handwritten digits, with a schedule, validation, early stopping and a checkpoint.

    python examples/lightning_module.py
    resile run examples/lightning_module.py --workers 3

Both end with the same parameters, bit for bit. Lines that a script for Trainer would not have are marked with
`# Resile`.
"""

import tempfile
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

from resile.integrations.lightning import ElasticTrainer  # Resile: instead of lightning.Trainer


class Digits(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        digits = load_digits()
        dataset = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
        self.training, self.held_out = random_split(dataset, [1500, 297], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> Any:
        return DataLoader(self.training, batch_size=64, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.held_out, batch_size=128)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self.layers(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("accuracy", (self.layers(inputs).argmax(1) == targets).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0)
checkpoint = ModelCheckpoint(monitor="accuracy", mode="max")
trainer = ElasticTrainer(
    accelerator="cpu",
    max_epochs=5,
    gradient_clip_val=1.0,
    log_every_n_steps=10,
    logger=CSVLogger(tempfile.mkdtemp()),
    callbacks=[checkpoint, EarlyStopping("accuracy", mode="max"), LearningRateMonitor()],
)
trainer.fit(Classifier(), datamodule=Digits())
trainer.print(f"best validation accuracy {checkpoint.best_model_score:.1%} in {checkpoint.best_model_path}")
