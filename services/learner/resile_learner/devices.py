"""The accelerators of this machine as torch sees them, in JSON.

A child of the fork server prints them, since agents never import torch, and a process that has computed must not fork
workers. `python -m resile_learner.devices` does the same.
"""

import hashlib
import itertools
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import orjson
import torch

from .probe import probe_digest

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MIG = "MIG-"
_CACHES = "/sys/devices/system/cpu/cpu0/cache"
_MAX_TEXT = 500
# What libraries of numerical code read from the environment; without the number of threads, which training sets.
_PREFIXES = (
    "ATEN_", "BLIS_ARCH", "CUBLAS", "CUDNN_", "DISABLE_ADDMM_CUDA_LT", "DNNL_", "MKL_", "NVIDIA_TF32", "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT", "ONEDNN_", "OPENBLAS_CORETYPE", "PYTORCH_TUNABLEOP", "TORCH_ALLOW_TF32", "TORCH_BLAS_",
    "TORCH_CUDNN", "TORCH_LINALG_",
)  # fmt: skip
_HARMLESS = ("_NUM_THREADS", "VERBOSE")
_DEFAULT = "CUBLAS_WORKSPACE_CONFIG=:4096:8"


Probe = Callable[[torch.device, str], str]
"""A function of a device and its description by `_describe` that returns the digest of the probe step."""


def device_class(device: torch.device, probe: Probe = lambda device, _: probe_digest(device)) -> str:
    """Describe what must be equal for equal bits: torch, processor, accelerator, environment, and a probe step.

    It computes the ``probe`` with torch's current settings.
    """
    described = _describe(device)
    return f"{described}, probe {probe(device, described)[:12]}"


def _describe(device: torch.device) -> str:
    """Describe the same without the probe step."""
    parts = [f"torch {torch.__version__}", f"{_processor()} {torch.backends.cpu.get_cpu_capability()}"]
    if device.type == "cuda":
        parts.append(f"{_accelerator(device)} cuda {torch.version.cuda} cudnn {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    return ", ".join([*parts, *_environment()])


def _accelerator(device: torch.device) -> str:
    """Name an accelerator and its number of multiprocessors: libraries choose kernels by both."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.multi_processor_count} SMs"


def _environment() -> list[str]:
    """List the variables that choose kernels; a long list as its digest."""
    found = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    found = [each for each in found if not each.partition("=")[0].endswith(_HARMLESS) and each != _DEFAULT]
    text = ", ".join(found)
    return found if len(text) <= _MAX_TEXT else [f"variables {hashlib.sha256(text.encode()).hexdigest()[:12]}"]


def _processor() -> str:
    """Name the processor and the sizes of its caches: libraries choose kernels and block sizes by both."""
    try:
        with open("/proc/cpuinfo") as file:
            first = list(
                itertools.takewhile(str.strip, file)
            )  # the first of many processors, which are described alike
    except OSError:
        return platform.machine()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first)}
    names = ("model name", "cpu family", "model", "CPU implementer", "CPU part")
    return " ".join([platform.machine(), *(fields[name] for name in names if name in fields), *_cache_sizes()])


def _cache_sizes() -> list[str]:
    """Return the sizes of the caches that the system knows the size of."""
    if not os.path.isdir(_CACHES):
        return []
    sizes = [Path(_CACHES, index, "size") for index in sorted(os.listdir(_CACHES)) if index.startswith("index")]
    return [size.read_text().strip() for size in sizes if size.exists()]


def accelerators() -> list[tuple[str, str]]:
    """List the accelerators: how CUDA_VISIBLE_DEVICES names each, and its class.

    A process sees at most one MIG slice, so a separate process describes each. Raises RuntimeError for slices that are
    not named in CUDA_VISIBLE_DEVICES.
    """
    named = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    if len(named) > 1 and any(name.startswith(_MIG) for name in named):
        return [found for name in named for found in _in_another_process(name)]
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if devices and not named and " MIG " in torch.cuda.get_device_name(devices[0]):
        raise RuntimeError(
            f"its GPUs are divided into MIG slices: set {_VISIBLE} to the slices' UUIDs, as `nvidia-smi -L` lists them"
        )
    classes: dict[str, str] = {}
    for device in devices:
        kind = _accelerator(device)
        if kind not in classes:
            classes[kind] = device_class(device)
    kinds = [classes[_accelerator(device)] for device in devices]
    return list(zip(named or map(str, range(len(devices))), kinds, strict=False))


def _in_another_process(name: str) -> list[tuple[str, str]]:
    command = [sys.executable, "-P", "-m", "resile_learner.devices"]
    done = subprocess.run(command, env={**os.environ, _VISIBLE: name}, stdout=subprocess.PIPE, check=True)
    described = orjson.loads(done.stdout)
    if "error" in described:
        raise RuntimeError(f"{name}: {described['error']}")
    return [(visible, kind) for visible, kind in described["accelerators"]]


def print_devices() -> None:
    """Print the accelerators, each with its class; without any, the class of the CPU; or why torch cannot tell."""
    torch.set_num_threads(1)  # as training does by default
    try:
        found = accelerators()
        described = {"accelerators": found, "cpu_class": "" if found else device_class(torch.device("cpu"))}
    except Exception as error:
        traceback.print_exc()
        described = {"error": f"{type(error).__name__}: {error}"}
    print(orjson.dumps(described).decode())


if __name__ == "__main__":
    print_devices()
