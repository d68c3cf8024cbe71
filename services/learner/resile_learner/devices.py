"""The accelerators of this machine as torch sees them: `python -m resile_learner.devices` prints them as JSON.

The agent runs it as a process of its own, since agents never import torch.
"""

import platform

import orjson
import torch


def device_class(device: torch.device) -> str:
    """What must be equal for equal bits: version of torch, instruction set, and model of the accelerator."""
    parts = [f"torch {torch.__version__}", platform.machine(), torch.backends.cpu.get_cpu_capability()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    return ", ".join(parts)


def main() -> None:
    """Print the number of accelerators and the class of device."""
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    print(orjson.dumps({"num_gpus": num_gpus, "device_class": device_class(device)}).decode())


if __name__ == "__main__":
    main()
