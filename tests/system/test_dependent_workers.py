"""A script that treats workers differently fails on all of them, by the name of what differs."""

from pathlib import Path

import pytest

from .running import plain, run

pytestmark = pytest.mark.long

SCRIPT = "dependent.py"


COMPLAINTS = {
    "dataset": "read other samples than the others for the same shard of the same epoch",
    "rate": "another learning rate (or another option of the optimizer) than",
    "schedule": "a learning-rate schedule in another state than the others",
    "stop": "the workers did not end training (stop(), or `break`) at the same iteration",
    "buffer": "other buffers of the model than",
    "state": 'another "best" (a part of state={...}) than',
    "last state": 'another "best" (a part of state={...}) than',
    "end": "another final model than",
}
BY_SHARDS = {
    "body": "computed another loss than the others for the same batch and the same parameters",
    "hook": "computed other gradients than the others for the same batch",
}
BY_BATCHES = {"body": "called the model with other inputs than the others"}


@pytest.mark.parametrize(
    ("body", "mistake", "complaint"),
    [
        *(("shard", *each) for each in (COMPLAINTS | BY_SHARDS).items()),
        *(("batch", *each) for each in (COMPLAINTS | BY_BATCHES).items()),
    ],
)
def test_what_differs_between_workers_is_named(body: str, mistake: str, complaint: str, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--workers", "2", home=tmp_path, args=("--mistake", mistake, "--body", body))
    assert outcome.status != 0
    assert complaint in outcome.errors


@pytest.mark.parametrize("args", [("--body", "shard"), ("--body", "batch"), ("--body", "batch", "--mistake", "hook")])
def test_without_a_mistake_the_bits_are_those_of_the_plain_script(args: tuple[str, ...], tmp_path: Path) -> None:
    """Hooks get the gradients of a whole batch where the body runs for it, so that they may count."""
    outcome = run(SCRIPT, "--plan", "0:2,5:3,8:1", home=tmp_path, args=args)
    assert outcome.sha == plain(SCRIPT, *args)
    assert outcome.result["bits"] == "same bits"
