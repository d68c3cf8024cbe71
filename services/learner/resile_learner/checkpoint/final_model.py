"""The final model as files that any PyTorch user opens.

``model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`` is all it takes, or
``model.load_state_dict(torch.load("model.pt", weights_only=True))``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from resile_shared.errors import UsageError
from resile_shared.storage.objects import StorageError


class UnsupportedModelError(UsageError):
    """The safetensors format cannot hold this model."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model cannot be saved as a safetensors file: {reason}; save it in a callback instead")


def save_model(state_dict: Mapping[str, Any], folder: Path) -> tuple[Path, ...]:
    """Write the tensors of a model's ``state_dict()`` to ``model.pt`` and ``model.safetensors``; return these files.

    Tied parameters are written once for each of their names: safetensors refuses shared memory, and leaving the second
    name out, as its ``save_model`` does, would make a strict ``load_state_dict`` fail. Entries that are not tensors (a
    module's extra state) are left out. Raises UnsupportedModelError for a dtype or layout that the format lacks, and
    StorageError if a file cannot be written.
    """
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                raise UnsupportedModelError(f"{name} has the layout {value.layout}")
            tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            memory = tensor.untyped_storage().data_ptr()
            is_view = tensor.untyped_storage().nbytes() != tensor.nbytes  # torch.save would write all of its memory
            tensors[name] = tensor.clone() if memory in memories or is_view else tensor
            memories.add(memory)
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except KeyError as error:
        raise UnsupportedModelError(f"it has no dtype {error.args[0]}") from error
    except SafetensorError as error:
        raise _unwritable(path, error) from error
    pickled = folder / "model.pt"
    try:
        torch.save(tensors, pickled)
    except (RuntimeError, OSError) as error:
        raise _unwritable(pickled, error) from error
    return pickled, path


def _unwritable(path: Path, error: Exception) -> StorageError:
    return StorageError(f"write {path}", str(error), "check the folder and the space there")
