"""All randomness of a run is a function of its seed and of where it is used; there is no RNG state to hand over."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

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
    seed_torch(value)


@contextmanager
def seeded(value: int) -> Iterator[None]:
    """Seed the global random generators, and restore them afterwards."""
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        seed_all(value)
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        torch.set_rng_state(saved[2])
        torch.cuda.set_rng_state_all(on_devices)


def seed_torch(value: int) -> None:
    """Seed torch's global generators alone."""
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


class DrawDetector:
    """Detects whether anything draws from python's or numpy's global generator."""

    def __init__(self) -> None:
        self._first_draws = random.Random(0).random(), np.random.RandomState(0).random_sample()

    def begin(self) -> None:
        """Start: put both generators into a known state."""
        random.seed(0)
        np.random.seed(0)

    def detected(self) -> bool:
        """Whether one of them has advanced since `begin`, judged by its next number. Ends the watch."""
        return (random.random(), np.random.random_sample()) != self._first_draws


def seed(value: int = 0) -> None:
    """Seed what a script does before its training call, such as the initial parameters of its model.

    Call it first in a script: then ``python train.py`` and an elastic run begin with the same parameters.
    """
    seed_all(mix("script", value))
