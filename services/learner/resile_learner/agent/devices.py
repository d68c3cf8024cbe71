"""Detects the slots that this host offers, and its device class."""

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pydantic

from resile_shared.errors import ResileError
from resile_shared.messages.hosts import Slot
from resile_shared.messages.message import Message
from resile_shared.parent_death import dying_with_parent
from resile_shared.settings import PREFIX


class TorchDevices(Message):
    """What `resile_learner.devices` prints."""

    accelerators: tuple[tuple[str, str], ...] = ()
    """How CUDA_VISIBLE_DEVICES names each, and its class."""
    cpu_class: str = "cpu"
    """Where there are none."""


@dataclass(frozen=True)
class HostDevices:
    """What a host offers to the pool. Hosts of one device class give the same bits."""

    slots: tuple[Slot, ...]
    device_class: str
    accelerators: tuple[str, ...] = ()
    """How CUDA_VISIBLE_DEVICES names ``cuda:0`` and so on."""
    warning: str = ""
    """What is not offered, and why."""

    def environment(self, *slots: Slot) -> dict[str, str]:
        """Return the variables that show a worker the accelerators of these slots, in this order, and no others."""
        indices = [int(slot.device.partition(":")[2]) for slot in slots if slot.device.startswith("cuda:")]
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.accelerators[index] for index in indices)} if indices else {}


async def detect_devices(environment: Mapping[str, str]) -> TorchDevices:
    """Ask torch, in a process of its own with the ``environment`` of workers. Raises ResileError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "resile_learner.devices"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        preexec_fn=dying_with_parent(),
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    try:
        return TorchDevices.model_validate_json(out)
    except pydantic.ValidationError:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise ResileError(f"torch cannot detect the devices of this host: {last or 'it printed nothing'}") from None


def may_have_accelerators() -> bool:
    """Whether a driver of accelerators is loaded; far cheaper than to ask torch."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def host_devices(devices: TorchDevices, *, slots: int | None, slots_per_gpu: int = 1) -> HostDevices:
    """Divide ``devices`` into slots.

    Without ``slots``, there is one slot for each accelerator times ``slots_per_gpu``, else one for each CPU core.
    Accelerators of another class than most others have no slots.
    """
    if not devices.accelerators:
        count = slots or len(os.sched_getaffinity(0))
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
