"""Whether the sums of a job travel from device to device."""

from collections.abc import Collection, Mapping

import torch

VARIABLE = "RESILE_DEVICE_EXCHANGE"
"""Variable in a job's environment. ``off``: gradients on devices travel over TCP. ``gloo``: those in CPU memory travel
over gloo, to test the exchange on devices where there are none."""
CPU = torch.device("cpu")


def exchange_device(devices: Collection[torch.device], environment: Mapping[str, str]) -> torch.device | None:
    """Return the device of parameters on ``devices`` if sums travel from there; None: they travel over TCP.

    A worker whose parameters are on several devices exchanges over TCP.
    """
    choice = environment.get(VARIABLE, "")
    if len(devices) != 1 or choice == "off":
        return None
    (device,) = devices
    return device if device.type == "cuda" or (device == CPU and choice == "gloo") else None
