"""All randomness of a run is a function of its seed and of where it is used; there is no RNG state to carry."""

import hashlib
import random

import numpy as np
import torch


def mix(*parts: int | str) -> int:
    """A 63-bit seed that depends on all ``parts``."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_all(value: int) -> None:
    """Seed python's, numpy's and torch's global generators (CUDA's too, once CUDA is in use)."""
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def seed(value: int = 0) -> None:
    """Seed what a script does before its training call, such as the initial parameters of its model.

    Call it first in a script: then ``python train.py`` and an elastic run begin with the same parameters.
    """
    seed_all(mix("script", value))
