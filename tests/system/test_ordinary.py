"""An ordinary loop with one more line keeps the promises, whatever happens while it trains or between its epochs."""

import re
from pathlib import Path

import pytest

from .running import Outcome, plain, run

pytestmark = pytest.mark.long

SCRIPT = "ordinary.py"
EPOCHS = 4


@pytest.fixture(scope="module")
def sha() -> str:
    """The bits of the plain script, in one process, without any launcher."""
    return plain(SCRIPT)


def assert_same(outcome: Outcome, sha: str) -> None:
    assert outcome.sha == sha
    assert outcome.result["bits"] == "same bits"
    outcome.assert_every_sample_once(epochs=EPOCHS)


@pytest.mark.parametrize("plan", ["0:1,6:3,12:2,15:4", pytest.param("0:3,5:1,11:6,18:2", marks=pytest.mark.nightly)])
def test_workers_join_and_leave_in_epochs_and_between_them(sha: str, plan: str, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", plan, home=tmp_path)
    assert_same(outcome, sha)
    assert outcome.sizes == [tuple(map(int, step.split(":"))) for step in plan.split(",")]


@pytest.mark.nightly
def test_a_worker_that_joins_begins_in_the_epoch_under_way(tmp_path: Path) -> None:
    run(SCRIPT, "--plan", "0:1,12:2", home=tmp_path)
    logs = [file.read_text() for file in tmp_path.glob("runs/*/logs/worker-*")]
    assert sorted(re.findall(r"epoch (\d):", log) for log in logs) == [["0", "1", "2", "3"], ["2", "3"]]


@pytest.mark.parametrize(
    "place", ["exchange", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("batch", "epoch"))]
)
def test_a_killed_worker_changes_nothing(sha: str, place: str, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    outcome = run(SCRIPT, "--workers", "3", home=tmp_path, args=("--kill", place, "--killed", str(killed)))
    assert killed.exists()
    assert_same(outcome, sha)


@pytest.mark.parametrize(
    ("place", "killed"),
    [
        ("batch", "batch"),
        pytest.param("epoch", "epoch", marks=pytest.mark.nightly),
        pytest.param("start", "exchange", marks=pytest.mark.nightly),
    ],
)
def test_a_loop_that_all_workers_leave_alike_ends_the_run_there(place: str, killed: str, tmp_path: Path) -> None:
    sha = plain(SCRIPT, "--leave", place)
    planned = run(SCRIPT, "--plan", "0:1,4:3,10:2", home=tmp_path, args=("--leave", place))
    kill = ("--kill", killed, "--killed", str(tmp_path / "killed"))
    struck = run(SCRIPT, "--workers", "3", home=tmp_path, args=("--leave", place, *kill))
    assert (tmp_path / "killed").exists()
    for outcome in (planned, struck):
        assert (outcome.sha, outcome.result["bits"]) == (sha, "same bits")
        assert outcome.result["iteration"] == (9 if place == "batch" else 12)
        counts = [(epoch["once"], epoch["more"]) for epoch in outcome.result["ledger"]["epochs"]]
        assert counts == [(123, 0), (72 if place == "batch" else 123, 0)]


@pytest.mark.parametrize("place", ["epoch", "start"])
def test_a_worker_that_leaves_the_loop_alone_fails_the_job(place: str, tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--workers", "2", home=tmp_path, args=("--leave", place, "--alone"))
    assert outcome.status == 1
    assert "the workers did not end training" in outcome.errors
    assert "at the same iteration" in outcome.errors


CLOSURES = """
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import resile.training

resile.training.seed(0)
inputs = torch.randn(60, 8)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=12)
model, optimizer, loader = resile.training.prepare(model, optimizer, loader, num_shards=3)
for epoch in loader.epochs(3):
    for x, y in loader:
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
"""


BY_HAND = """
import sys
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import resile.training

resile.training.seed(0)
inputs = torch.randn(60, 8)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
loop = resile.training.ElasticLoop(model, optimizer, data, epochs=3, batch_size=12, num_shards=3)
for iteration in loop:
    for x, y in iteration.shards():
        iteration.backward(F.cross_entropy(model(x), y))
    if iteration.exchange():
        optimizer.step()
        if iteration.number == 8 and (loop.is_lowest_rank or sys.argv[-1] != "alone"):
            break
"""


def test_a_loop_by_hand_that_all_workers_leave_alike_ends_the_run_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BY_HAND)
    outcome = run(script, "--plan", "0:1,4:3", home=tmp_path)
    assert (outcome.sha, outcome.result["iteration"]) == (plain(script), 9)
    alone = run(script, "--workers", "2", home=tmp_path, args=("alone",))
    assert alone.status == 1
    assert "the workers did not end training" in alone.errors


def test_a_worker_joins_a_loop_whose_optimizer_need_not_have_a_closure(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CLOSURES)
    outcome = run(script, "--plan", "0:1,4:3,9:2", home=tmp_path)
    assert outcome.sha == plain(script)
    outcome.assert_every_sample_once(epochs=3)


EPOCH_STARTS = """
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import resile.training

class Scaled(torch.nn.Linear):
    temperature = 1.0

    def forward(self, inputs):
        return super().forward(inputs) * self.temperature

resile.training.seed(0)
inputs = torch.randn(60, 8)
model = Scaled(8, 2)
model.history = []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
progress = resile.training.State(momentum=0.5)
loader = DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size=20, shuffle=True)
model, optimizer, loader, scheduler = resile.training.prepare(
    model, optimizer, loader, scheduler, num_shards=3, state={"progress": progress}
)
for epoch in loader.epochs(4):
    model.temperature *= 0.9
    model.history.append(epoch)
    progress.momentum += 0.1
    optimizer.param_groups[0]["momentum"] = progress.momentum
    if epoch:
        scheduler.step()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def test_code_at_the_start_of_an_epoch_counts_once_and_what_it_loses_is_named_whoever_joins_or_is_lost(
    tmp_path: Path,
) -> None:
    """Epochs have three iterations: workers join in the first, and at the start of the third."""
    script = tmp_path / "train.py"
    script.write_text(EPOCH_STARTS)
    sha = plain(script)
    for plan in ("0:1,1:3,6:2", "0:2,5:1,7:3"):
        outcome = run(script, "--plan", plan, home=tmp_path)
        assert (outcome.sha, outcome.result["bits"]) == (sha, "same bits")
        assert outcome.errors.count("model.history is a list that the script changes between iterations") == 1
    for number in (4, 7):  # the first iterations of epochs
        killed = tmp_path / str(number)
        outcome = run("killed_once.py", "--workers", "3", home=tmp_path, args=(str(killed), str(number), str(script)))
        assert killed.exists()
        assert (outcome.sha, outcome.result["bits"]) == (sha, "same bits")


@pytest.mark.nightly
def test_a_grad_scaler_and_processes_that_read_ahead_keep_the_bits(tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:2,8:3", home=tmp_path, args=("--bf16", "--num-workers", "1"))
    assert_same(outcome, plain(SCRIPT, "--bf16"))


@pytest.mark.nightly
def test_a_batch_sampler_whose_batches_differ_in_length_keeps_the_bits(tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:1,6:3,15:2", home=tmp_path, args=("--buckets", "--num-workers", "1"))
    assert outcome.sha == plain(SCRIPT, "--buckets")
    assert all(epoch["as_drawn"] and epoch["once"] == 120 for epoch in outcome.result["ledger"]["epochs"])


@pytest.mark.nightly
def test_a_weighted_sampler_draws_the_same_on_all_workers(tmp_path: Path) -> None:
    outcome = run(SCRIPT, "--plan", "0:1,6:3,15:2", home=tmp_path, args=("--weighted",))
    assert outcome.sha == plain(SCRIPT, "--weighted")
    assert all(epoch["more"] > 0 and epoch["as_drawn"] for epoch in outcome.result["ledger"]["epochs"])


def test_a_stream_of_unknown_length_follows_a_plan_far_beyond_its_estimate(tmp_path: Path) -> None:
    outcome = run("stream.py", "--plan", "0:1,5:3,9:2", home=tmp_path, seconds=120)
    assert outcome.sha == plain("stream.py")
    assert outcome.sizes == [(0, 1), (5, 3), (9, 2)]
    assert "has no effect" not in outcome.errors
    outcome.assert_every_sample_once(epochs=2)


@pytest.mark.nightly
def test_a_worker_that_joins_a_stream_at_the_start_of_an_epoch_goes_on_where_it_was(tmp_path: Path) -> None:
    assert run("stream.py", "--plan", "0:1,12:3", home=tmp_path, seconds=120).sha == plain("stream.py")
