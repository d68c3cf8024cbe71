"""Hugging Face's Trainer, elastic: a tiny GPT-2, made from its configuration, learns Python's own source code.

    python examples/transformers_trainer.py
    resile run examples/transformers_trainer.py --workers 3

Both end with the same parameters, bit for bit. Lines that a script for Trainer would not have are marked with
`# Resile`.
"""

import bisect
import inspect
import tempfile
import textwrap

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from resile.integrations.transformers import ElasticTrainer  # Resile: instead of Trainer

BLOCK = 32


class SourceCode(Dataset[dict[str, Tensor]]):
    """Pieces of ``BLOCK`` bytes of the source of a module."""

    def __init__(self, module: object) -> None:
        self.pieces = torch.tensor(list(inspect.getsource(module).encode())).split(BLOCK)[:-1]  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


set_seed(0)
trainer = ElasticTrainer(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=BLOCK, n_embd=32, n_layer=2, n_head=2)),
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=4,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        use_cpu=True,
    ),
    train_dataset=SourceCode(textwrap),
    eval_dataset=SourceCode(bisect),
)
trainer.train()
print(trainer.evaluate())
trainer.save_model()
