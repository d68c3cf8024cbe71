"""A script for Lightning's Trainer, for a table of docs/migrating.md."""

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

lightning.seed_everything(0)
inputs = torch.randn(96, 4)
dataset = TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.print(f"epoch {self.current_epoch}: loss {torch.stack(self.losses).mean():.4f}")
        self.losses.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


loader = DataLoader(dataset, batch_size=6, shuffle=True)
trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=4, strategy="ddp", logger=False)
trainer.fit(Classifier(), loader)
