"""A worker that joins has loaded what its first step needs, and is as if it had not."""

import random

import pytest
import torch

from resile_learner.training import prewarm


def test_each_accelerator_takes_a_step_before_the_worker_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it lacks an operation of the step; a CPU is warm from the imports."""
    taken: list[torch.device] = []
    probe_digest = prewarm.probe_digest

    def record(device: torch.device) -> str:
        taken.append(device)
        return probe_digest(device)

    monkeypatch.setattr(prewarm, "probe_digest", record)
    meta = torch.device("meta")  # has no values: the step fails at its end
    with pytest.raises(RuntimeError):
        probe_digest(meta)
    prewarm.prewarm_devices([torch.device("cpu"), meta])
    assert taken == [meta]


def test_the_step_draws_no_random_numbers_and_changes_no_setting() -> None:
    def state() -> tuple[object, ...]:
        settings = torch.get_deterministic_debug_mode(), torch.is_grad_enabled(), torch.get_default_dtype()
        return random.getstate(), torch.get_rng_state().numpy().tobytes(), settings

    before = state()
    with torch.no_grad():
        prewarm.probe_digest(torch.device("cpu"))
    assert state() == before
