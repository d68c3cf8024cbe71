"""What torch sees of this machine, in a process of its own: `python -m resile_learner.devices` prints it as JSON."""

import orjson
import torch

from .training.determinism import device_class


def main() -> None:
    """Print the number of accelerators, and what has to be equal for equal bits."""
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    print(orjson.dumps({"num_gpus": num_gpus, "device_class": device_class(device)}).decode())


if __name__ == "__main__":
    main()
