"""The files of a job's final model in object storage: safetensors, and beside it what `torch.load` reads."""

from pathlib import Path, PurePosixPath
from typing import Literal

ModelFormat = Literal["safetensors", "pt"]


def format_of(file: Path) -> ModelFormat:
    """Return the format that the name of ``file`` asks for: "pt" if it ends in .pt or .pth, else "safetensors"."""
    return "pt" if file.suffix in (".pt", ".pth") else "safetensors"


def key_of(model: str, model_format: ModelFormat) -> str:
    """Return the key of the file in ``model_format`` beside ``model``, the key of the safetensors file."""
    return str(PurePosixPath(model).with_suffix(f".{model_format}"))
