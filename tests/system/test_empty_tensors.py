"""A model some of whose parameters and buffers have no elements trains as any other, with every training call."""

from pathlib import Path

import pytest

from .running import plain, run

SCRIPT = "empty_tensors.py"


@pytest.mark.parametrize("call", ["batch", "shard", "loop", "model"])
def test_parameters_and_buffers_without_elements_are_trained_with(call: str, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:1,2:3,5:2", home=tmp_path, args=(call,))
    assert outcome.sha == plain(SCRIPT, call)
    assert outcome.sizes == [(0, 1), (2, 3), (5, 2)]
    outcome.assert_every_sample_once(epochs=2)
