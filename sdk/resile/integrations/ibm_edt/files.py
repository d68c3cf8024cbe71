"""The files of a trained model, where the platform has them."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .environment import result_dir


class ModelFiles:
    """``model/train`` in RESULT_DIR: the parameters and the optimizer's state of epochs, and of the end."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    @property
    def folder(self) -> Path:
        """Where they are."""
        return result_dir() / "model" / "train"

    def save(self, name: str) -> None:
        """Write ``model_epoch_<name>.pth``, and the same for the optimizer. Each file is written whole."""
        parts = {"": self._model.state_dict(), "_optimizer_state": self._optimizer.state_dict()}
        for suffix, state in parts.items():
            _write(self.folder / f"model_epoch_{name}{suffix}.pth", lambda path, state=state: torch.save(state, path))  # type: ignore[misc]

    def save_scores(self, tests: Sequence[Any]) -> None:
        """Write the scores of all validations to ``val_dict_list.json`` in RESULT_DIR."""
        _write(result_dir() / "val_dict_list.json", lambda path: path.write_text(json.dumps(list(tests))))

    def save_onnx(self, inputs: Any) -> None:
        """Write ``model_epoch_final.onnx``, from a batch of ``inputs``."""
        mode = self._model.training
        self._model.eval()
        try:
            path = self.folder / "model_epoch_final.onnx"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.onnx.export(self._model, (inputs,), path)
        finally:
            self._model.train(mode)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    write(unfinished)
    unfinished.replace(path)
