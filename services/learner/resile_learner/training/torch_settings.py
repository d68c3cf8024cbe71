"""Settings of PyTorch that determine the bits: those that a run sets itself, and those that are the script's."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.backends import cuda, cudnn
from torch.utils import deterministic

from resile_shared.errors import UsageError


@dataclass(frozen=True)
class Setting:
    """A setting that a run sets, and restores at its end."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


def _set_fill(value: bool) -> None:
    deterministic.fill_uninitialized_memory = value  # type: ignore[attr-defined]


def _set_benchmark(value: bool) -> None:
    cudnn.benchmark = value


def _set_mode(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


_COMPILED: dict[tuple[str, str], Any] = {
    ("torch._inductor.config", "deterministic"): True,
    ("torch._dynamo.config", "automatic_dynamic_shapes"): False,
    ("torch._dynamo.config", "recompile_limit"): 256,  # functions that reach it are not compiled any more
}
"""Settings, by module and name, with which rules and not timings on this worker choose kernels of compiled functions.

Each size has kernels of its own: those for all sizes would replace them on workers that have met a second size.
"""


def _compiled() -> dict[tuple[str, str], Any]:
    """The current values of `_COMPILED`, as far as torch.compile is loaded: that takes seconds, and few jobs need it.

    An older PyTorch lacks some names, and refuses to set them.
    """
    known = ((name, sys.modules.get(name[0])) for name in _COMPILED)
    return {name: getattr(module, name[1]) for name, module in known if hasattr(module, name[1])}


def _set_compiled(values: dict[tuple[str, str], Any]) -> None:
    for (module, name), value in values.items():
        setattr(sys.modules[module], name, value)


def set_compiled_alike() -> None:
    """Make compiled functions use the same kernels on all workers."""
    _set_compiled({name: _COMPILED[name] for name in _compiled()})


OWN = (
    Setting(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_mode,
    ),
    Setting(lambda: bool(deterministic.fill_uninitialized_memory), _set_fill),  # type: ignore[attr-defined]
    Setting(lambda: cudnn.benchmark, _set_benchmark),
    Setting(torch.get_num_threads, torch.set_num_threads),
    Setting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    Setting(torch.is_warn_always_enabled, torch.set_warn_always),
    Setting(_compiled, _set_compiled),
)

_backends: Any = torch.backends  # parts of it are made at run time
# PyTorch 2.9 has a second way to set precisions. Where a script uses both, only the new one can be read.
_PRECISIONS: dict[str, Callable[[], Any]] = {
    "torch.backends.fp32_precision": lambda: _backends.fp32_precision,
    "torch.backends.cuda.matmul.fp32_precision": lambda: _backends.cuda.matmul.fp32_precision,
    "torch.backends.cudnn.conv.fp32_precision": lambda: _backends.cudnn.conv.fp32_precision,
    "torch.backends.cudnn.rnn.fp32_precision": lambda: _backends.cudnn.rnn.fp32_precision,
    "torch.backends.mkldnn.matmul.fp32_precision": lambda: _backends.mkldnn.matmul.fp32_precision,
    "torch.backends.mkldnn.conv.fp32_precision": lambda: _backends.mkldnn.conv.fp32_precision,
    "torch.backends.mkldnn.rnn.fp32_precision": lambda: _backends.mkldnn.rnn.fp32_precision,
}
_OLD_PRECISIONS: dict[str, Callable[[], Any]] = {
    "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision,
    "torch.backends.cudnn.allow_tf32": lambda: cudnn.allow_tf32,
}
_READ: dict[str, Callable[[], Any]] = {
    **(_PRECISIONS if hasattr(_backends, "fp32_precision") else _OLD_PRECISIONS),
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.backends.cuda.matmul.allow_fp16_accumulation": lambda: getattr(
        cuda.matmul, "allow_fp16_accumulation", False
    ),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": lambda: (
        cuda.matmul.allow_fp16_reduced_precision_reduction
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": lambda: (
        cuda.matmul.allow_bf16_reduced_precision_reduction
    ),
    "torch.backends.cuda.flash_sdp_enabled()": cuda.flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": cuda.mem_efficient_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": cuda.math_sdp_enabled,
    "torch.backends.cudnn.enabled": lambda: cudnn.enabled,
    "torch.backends.mkldnn.enabled": lambda: _backends.mkldnn.enabled,
}


def script_settings() -> dict[str, str]:
    """Return, as text by name, the settings that a script decides; they must be equal on all workers."""
    return {name: str(read()) for name, read in _READ.items()}


def check_unchanged(before: dict[str, str]) -> None:
    """Raises UsageError, naming the first of the script's settings that is not as it was ``before``."""
    for name, value in script_settings().items():
        if value != before[name]:
            raise UsageError(
                f"{name} became {value} after the training call began, instead of {before[name]}: a joining worker "
                "could not know; set it before the training call"
            )
