"""A script that treats workers differently fails on all of them, by the name of what differs."""

from pathlib import Path

import pytest

from .running import plain, run

pytestmark = pytest.mark.long

SCRIPT = "dependent.py"


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("dataset", "read other samples than the others for the same shard of the same epoch"),
        ("body", "computed another loss than the others for the same batch and the same parameters"),
        ("rate", "another learning rate (or another option of the optimizer) than"),
        ("schedule", "a learning-rate schedule in another state than the others"),
        ("stop", "the workers did not end training (stop(), or `break`) at the same iteration"),
        ("buffer", "other buffers of the model than"),
        ("hook", "computed other gradients than the others for the same batch"),
        ("state", 'another "best" (a part of state={...}) than'),
        ("last state", 'another "best" (a part of state={...}) than'),
        ("end", "another final model than"),
    ],
)
def test_what_differs_between_workers_is_named(mistake: str, complaint: str, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--workers", "2", home=tmp_path, args=("--mistake", mistake))
    assert outcome.status != 0
    assert complaint in outcome.errors


def test_without_a_mistake_the_bits_are_those_of_the_plain_script(tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:2,5:3,8:1", home=tmp_path)
    assert outcome.sha == plain(SCRIPT)
    assert outcome.result["bits"] == "same bits"
