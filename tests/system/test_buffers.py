"""Buffers that combine by rules are those of plain PyTorch, with the same bits on any number of workers."""

from pathlib import Path

import pytest
import torch

from .running import plain, plain_output, run

pytestmark = pytest.mark.long

SCRIPT = "combined.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The bits of one worker, and where its model is."""
    file = tmp_path_factory.mktemp("combined") / "found.pt"
    return plain(SCRIPT, "--write", str(file)), file


def test_a_codebook_a_queue_and_counts_are_those_of_plain_pytorch(found: tuple[str, Path], tmp_path: Path) -> None:
    plain_output(SCRIPT, "--plain", "--write", str(tmp_path / "plain.pt"))
    expected, divided = torch.load(tmp_path / "plain.pt"), torch.load(found[1])
    for name, value in expected.items():
        torch.testing.assert_close(divided[name], value, rtol=1e-5, atol=1e-5)
    assert divided["seen"] == 3 * (8 * 48 + 40)


@pytest.mark.parametrize("options", [("--workers", "2"), ("--workers", "3"), ("--plan", "0:3,8:1,12:4,20:2")])
def test_any_number_of_workers_gives_the_same_bits(
    found: tuple[str, Path], options: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = run(SCRIPT, *options, home=tmp_path)
    assert outcome.sha == found[0]
    assert "computes the model in full" not in outcome.errors


@pytest.mark.parametrize("megabytes", [6, pytest.param(64, marks=pytest.mark.nightly)])
def test_a_large_buffer_that_changes_takes_part_in_any_plan(megabytes: int, tmp_path: Path) -> None:
    """Its changes in the shards of a worker are more than a frame can have."""
    args = ("--megabytes", str(megabytes), "--num-shards", "24", "--epochs", "1")
    outcome = run(SCRIPT, "--plan", "0:1,2:3,4:7,7:2", home=tmp_path, args=args)
    assert [size for _, size in outcome.sizes] == [1, 3, 7, 2]
    assert outcome.sha == plain(SCRIPT, *args)


def test_bodies_for_each_shard_have_the_same_buffers_on_any_number_of_workers(tmp_path: Path) -> None:
    args = ("--body", "shard", "--megabytes", "6")
    assert run(SCRIPT, "--plan", "0:3,4:1,8:2", home=tmp_path, args=args).sha == plain(SCRIPT, *args)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_buffer_without_a_rule_is_named_before_it_counts_where_a_body_runs_for_each_shard(
    workers: str, tmp_path: Path
) -> None:
    outcome = run(SCRIPT, "--workers", workers, home=tmp_path, args=("--undeclared", "--body", "shard"))
    assert outcome.status != 0
    assert 'seen="sum", largest="max", smallest="min", flags="any"' in outcome.errors
    assert 'queue="concat", pointer="concat"' in outcome.errors
    assert "epoch 1" not in outcome.errors


def test_a_buffer_without_a_rule_is_named_and_right_where_a_body_runs_for_each_batch(tmp_path: Path) -> None:
    plain_output(SCRIPT, "--plain", "--write", str(tmp_path / "plain.pt"))
    args = ("--undeclared", "--write", str(tmp_path / "found.pt"))
    outcome = run(SCRIPT, "--workers", "2", home=tmp_path, args=args)
    assert outcome.status == 0
    assert 'seen="sum", largest="max", smallest="min", flags="any"' in outcome.errors
    assert 'queue="concat", pointer="concat"' in outcome.errors
    expected, found = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "found.pt")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
