"""Detects the slots that this host offers, and its device class."""

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import pydantic

from resile_shared.errors import ResileError
from resile_shared.messages.hosts import Slot
from resile_shared.messages.message import Message
from resile_shared.parent_death import dying_with_parent
from resile_shared.settings import PREFIX


class TorchDevices(Message):
    """What `resile_learner.devices` prints."""

    num_gpus: int
    device_class: str


@dataclass(frozen=True)
class HostDevices:
    """What a host offers to the pool. Hosts of one device class give the same bits."""

    slots: tuple[Slot, ...]
    device_class: str


async def detect_devices(*, slots: int | None, slots_per_gpu: int) -> HostDevices:
    """Ask torch, in a process of its own. Raises ResileError.

    Without ``slots``, there is one slot for each accelerator times ``slots_per_gpu``, else one for each CPU core.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "resile_learner.devices"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=dying_with_parent(),
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    try:
        devices = TorchDevices.model_validate_json(out)
    except pydantic.ValidationError:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        raise ResileError(f"torch cannot detect the devices of this host: {last or 'it printed nothing'}") from None
    return HostDevices(_slots(devices.num_gpus, slots, slots_per_gpu), devices.device_class)


def _slots(num_gpus: int, wanted: int | None, slots_per_gpu: int) -> tuple[Slot, ...]:
    if not num_gpus:
        return tuple(Slot(index=index) for index in range(wanted or len(os.sched_getaffinity(0))))
    count = wanted or num_gpus * slots_per_gpu
    return tuple(Slot(index=index, device=f"cuda:{index % num_gpus}") for index in range(count))


def slot_environment(slot: Slot, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that show a worker the accelerator of its slot, and no other."""
    kind, _, index = slot.device.partition(":")
    if kind != "cuda":
        return {}
    visible = [name for name in inherited.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": visible[int(index)] if visible else index}


def inheritable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of ``environment`` that workers inherit: nothing about the pool's services."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
