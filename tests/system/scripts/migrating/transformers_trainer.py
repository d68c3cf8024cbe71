"""A script for Hugging Face's Trainer, for a table of docs/migrating.md."""

import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments, set_seed

set_seed(0)
inputs = torch.randn(96, 4)
dataset = [{"x": x, "labels": int(x.sum() > 0)} for x in inputs]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


model = Classifier()
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    num_train_epochs=3,
    per_device_train_batch_size=6,
    gradient_accumulation_steps=4,
    save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=dataset)
trainer.train()
trainer.save_model()
