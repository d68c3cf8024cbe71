"""The final model as a file that any PyTorch user opens.

``model.load_state_dict(safetensors.torch.load_file("model.safetensors"))`` is all it takes.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from resile_shared.errors import UsageError
from resile_shared.storage import StorageError


class UnsupportedModelError(UsageError):
    """The safetensors format cannot hold this model."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model cannot be saved as a safetensors file: {reason}; save it in a callback instead")


def save_model(state_dict: Mapping[str, Any], path: Path) -> None:
    """Write the tensors of a model's ``state_dict()`` to ``path``.

    Tied parameters are written once for each of their names: safetensors refuses shared memory, and leaving the second
    name out, as its ``save_model`` does, would make a strict ``load_state_dict`` fail. Entries that are not tensors (a
    module's extra state) are left out. Raises UnsupportedModelError for a dtype or layout that the format lacks.
    """
    tensors: dict[str, Tensor] = {}
    memories: set[int] = set()
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                raise UnsupportedModelError(f"{name} has the layout {value.layout}")
            tensor = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            memory = tensor.untyped_storage().data_ptr()
            tensors[name] = tensor.clone() if memory in memories else tensor
            memories.add(memory)
    try:
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    except KeyError as error:
        raise UnsupportedModelError(f"it has no dtype {error.args[0]}") from error
    except SafetensorError as error:
        raise StorageError(f"write {path}", str(error), "check the folder and the space there") from error
