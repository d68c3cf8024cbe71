"""Detects the slots that this host offers, and its device class."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pydantic

from resile_shared.control_groups import num_processors
from resile_shared.errors import ResileError
from resile_shared.messages.hosts import Slot
from resile_shared.messages.message import Message
from resile_shared.settings import PREFIX

from ..processes.client import ForkServerClient

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class TorchDevices(Message):
    """What `resile_learner.devices` prints."""

    error: str = ""
    """Why torch cannot detect the devices; empty if it can."""
    accelerators: tuple[tuple[str, str], ...] = ()
    """Name in CUDA_VISIBLE_DEVICES and device class of each accelerator."""
    cpu_class: str = "cpu"
    """Device class of a host without accelerators."""


@dataclass(frozen=True)
class HostDevices:
    """What a host offers to the pool. Hosts of one device class give the same bits."""

    slots: tuple[Slot, ...]
    device_class: str
    accelerators: tuple[str, ...] = ()
    """Names in CUDA_VISIBLE_DEVICES of ``cuda:0`` and so on."""
    warning: str = ""
    """Which accelerators are not offered, and why; empty if all are."""

    def environment(self, *slots: Slot) -> dict[str, str]:
        """Return the variables that show a worker the accelerators of these slots, in this order, and no others."""
        indices = [int(slot.device.partition(":")[2]) for slot in slots if slot.device.startswith("cuda:")]
        return {VISIBLE_DEVICES: ",".join(self.accelerators[index] for index in indices)} if indices else {}


async def detect_devices(fork_server: ForkServerClient, env: Mapping[str, str] = NO_VARIABLES) -> TorchDevices:
    """Ask torch, in a process with the environment of workers and ``env``. Raises ResileError."""
    try:
        devices = TorchDevices.model_validate_json(await fork_server.describe_devices(env))
    except pydantic.ValidationError:
        devices = TorchDevices(error="the process that asks it has ended")
    if devices.error:
        raise ResileError(f"torch cannot detect the devices of this host: {devices.error}")
    return devices


def may_have_accelerators() -> bool:
    """Whether a driver of accelerators is loaded; far cheaper than asking torch."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def host_devices(devices: TorchDevices, *, slots: int | None, slots_per_gpu: int = 1) -> HostDevices:
    """Divide ``devices`` into slots.

    Without ``slots``, there is one slot for each accelerator times ``slots_per_gpu``, else one for each CPU core that
    this process may use. Accelerators of another class than most others have no slots.
    """
    if not devices.accelerators:
        count = slots or num_processors()
        return HostDevices(tuple(Slot(index=index) for index in range(count)), devices.cpu_class)
    names, classes = zip(*devices.accelerators, strict=True)
    ((device_class, _),) = Counter(classes).most_common(1)
    used = [index for index, kind in enumerate(classes) if kind == device_class]
    count = slots or len(used) * slots_per_gpu
    offered = tuple(Slot(index=index, device=f"cuda:{used[index % len(used)]}") for index in range(count))
    left_out = ",".join(name for name, kind in devices.accelerators if kind != device_class)
    warning = (
        f"accelerators {left_out} are not used: those of a host must be of one class, and most are {device_class}. "
        f"For the others, start another host with CUDA_VISIBLE_DEVICES={left_out}"
    )
    return HostDevices(offered, device_class, names, warning if left_out else "")


def inheritable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of ``environment`` that workers inherit: nothing about the pool's services."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
