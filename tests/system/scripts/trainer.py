"""An ElasticTrainer with everything that a joiner has to be told: callbacks, the best model, schedules, scores."""

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments, set_seed

from resile.integrations.transformers import ElasticTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--schedule", default="cosine")
parser.add_argument("--kill", type=Path, help="a file; the worker that creates it kills itself")
parser.add_argument("--stop-one", action="store_true", help="one worker alone stops training")
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Milestones(TrainerCallback):  # type: ignore[misc]
    """Ends training after 33 steps of its own count, and lets the rate jump after 20."""

    def __init__(self) -> None:
        self.steps = 0
        self.seen: list[float] = []

    def on_train_begin(self, *arguments: Any, **more: Any) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps += 1
        assert self.steps == state.global_step
        if self.steps == 20:
            more["optimizer"].param_groups[0]["weight_decay"] = 0.1
        if self.steps == 33:
            control.should_training_stop = True
        if options.stop_one and state.global_step == 5 and state.is_world_process_zero:
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **more: Any) -> None:
        self.seen.append(metrics["eval_accuracy"])
        assert len(self.seen) == sum("eval_loss" in entry for entry in state.log_history)
        if state.is_world_process_zero and options.kill and len(self.seen) == 2 and not options.kill.exists():
            options.kill.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def samples(size: int) -> list[dict[str, Any]]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(size))
    return [{"x": row, "labels": int(row.sum() > 0)} for row in x]


set_seed(0)
trainer = ElasticTrainer(
    model=Model(),
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=0.02,
        lr_scheduler_type=options.schedule,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=samples(150),
    eval_dataset=samples(40),
    compute_metrics=lambda outcome: {"accuracy": float((outcome.predictions.argmax(1) == outcome.label_ids).mean())},
    callbacks=[EarlyStoppingCallback(early_stopping_patience=30), Milestones()],
    num_shards=4,
)
trainer.train()
best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
assert trainer.evaluate()["eval_loss"] == best
