"""What users get wrong is answered with one clear line, a fitting exit status, and no traceback of ours."""

import re
from typing import Any

import pytest

PREAMBLE = """
import os, torch
from torch import nn
from torch.utils.data import TensorDataset
from resile.training import Callback, ElasticModel

def train(*, samples=96, batch_size=48, loss=nn.CrossEntropyLoss(), callbacks=(), **options):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.zeros(samples, 4), torch.zeros(samples, dtype=torch.long))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ElasticModel(model, lambda: (data, None), loss, optimizer, callbacks=callbacks).train(
        batch_size=batch_size, **options
    )
"""

FAULTY = {
    "no training call": ("print('done')", 1, "the script ended without a training call"),
    "syntax error": ("def f(:\n", 1, "SyntaxError"),
    "missing module": ("import no_such_module", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
    "exception": ("def f():\n    raise ValueError('bad data')\nf()", 1, "ValueError: bad data"),
    "exit status": ("import sys; sys.exit(3)", 1, "sys.exit(3)"),
    "hard exit": ("import os; os._exit(4)", 1, "ended its process with exit status 4"),
    "crash": ("import os; os.abort()", 1, "killed by SIGABRT"),
    "exception in training": (
        "def wrong(outputs, targets):\n    raise ValueError('bad loss')\ntrain(loss=wrong)", 1, "ValueError: bad loss",
    ),
    "exception after training": ("train()\nraise ValueError('too late')", 1, "ValueError: too late"),
    "bad option": ("train(epochs=0)", 1, "epochs is 0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_script_is_explained_in_one_line(fault: str, resile: Any) -> None:
    text, status, answer = FAULTY[fault]
    ended = resile.run("run", resile.script(PREAMBLE + text), "--workers", "2")
    assert ended.status == status, ended.err
    assert ended.last_error.startswith("resile: worker ")
    assert answer in ended.last_error
    assert ended.err.count("resile: ") == 1
    assert "resile_learner/agent" not in ended.err
    assert "asyncio" not in ended.err


def test_the_users_traceback_is_shown_above_the_line(resile: Any) -> None:
    text, _, _ = FAULTY["exception"]
    ended = resile.run("run", resile.script(PREAMBLE + text), "--workers", "1")
    assert "Traceback (most recent call last):" in ended.err
    assert "raise ValueError('bad data')" in ended.err
    assert "runpy" not in ended.err
    assert "fork server" not in ended.err


def test_a_script_that_trains_alone_on_every_worker_is_named_while_it_does(resile: Any) -> None:
    text = """
import torch
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(100):
    weight.sum().backward()
    optimizer.step()
"""
    ended = resile.run("run", resile.script(text), "--workers", "2")
    assert ended.status == 1
    assert ended.out.count("each worker is running this script alone. Call resile.training.prepare(") == 1
    assert "the script ended without a training call" in ended.last_error


def test_no_more_workers_start_than_there_are_shards_and_a_note_says_so(resile: Any) -> None:
    ended = resile.run("run", resile.script(PREAMBLE + "train()"), "--workers", "7")
    assert ended.status == 0, ended.err
    assert "note: 6 of 7 workers train: a batch of 48 is cut into so many shards" in ended.out
    assert "iteration 0: 6 workers" in ended.out


def test_a_plan_has_no_more_workers_than_there_are_shards_and_a_note_says_so(resile: Any) -> None:
    ended = resile.run("run", resile.script(PREAMBLE + "train(samples=240)"), "--plan", "0:1,1:7,2:6,3:2")
    assert ended.status == 0, ended.err
    assert ended.out.count("note: 6 of 7 workers train: a batch of 48 is cut into so many shards") == 1
    changes = [line.split(" (")[0] for line in ended.out.splitlines() if re.match(r"iteration \d+: ", line)]
    assert changes == ["iteration 0: 1 worker", "iteration 1: 1 -> 6 workers", "iteration 3: 6 -> 2 workers"]


def test_workers_that_disagree_are_told_so(resile: Any) -> None:
    text = "import random, time\nrandom.seed(time.time_ns())\ntrain(samples=48 * random.randrange(1, 10**6))"
    ended = resile.run("run", resile.script(PREAMBLE + text), "--workers", "2")
    assert ended.status == 1
    by_whom = ("disagrees with worker", "loaded a different dataset than the others")  # the scheduler, or the members
    assert any(said in ended.last_error for said in by_whom)


def test_a_worker_whose_environment_chooses_other_kernels_is_named(resile: Any) -> None:
    text = """
try:
    os.mkdir(os.environ["FIRST_WORKER"])
    os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
except FileExistsError:
    pass
train()
"""
    script = resile.script(PREAMBLE + text)
    ended = resile.run("run", script, "--workers", "3", "--env", f"FIRST_WORKER={resile.folder}/first")
    assert ended.status == 1
    assert "has another class of device than the others: " in ended.last_error
    assert ", ONEDNN_MAX_CPU_ISA=SSE41, " in ended.last_error
    assert 'Use devices of one class, or train with mode="fast"' in ended.last_error


def test_with_json_a_failure_is_an_object_too(resile: Any) -> None:
    ended = resile.run("run", resile.script("raise SystemExit(3)"), "--workers", "1", "--json")
    assert ended.status == 1
    document = ended.json
    assert document["state"] == "failed"
    assert "sys.exit(3)" in document["error"]
    assert document["history"][-1]["kind"] == "failed"
    assert document["params_sha256"] is None


def test_a_plan_that_reaches_beyond_the_end_is_noted(resile: Any) -> None:
    ended = resile.run("run", resile.script(PREAMBLE + "train()"), "--plan", "0:1,500:2")
    assert ended.status == 0, ended.err
    assert "step 500:2 of the plan has no effect: training ends at iteration 2" in ended.out


def test_a_home_that_cannot_be_made_is_told(resile: Any) -> None:
    ended = resile.run("run", resile.script(), "--home", "/proc/nowhere")
    assert ended.status == 2
    assert "the home folder /proc/nowhere cannot be used" in ended.last_error


def test_storage_that_nobody_knows_is_told(resile: Any) -> None:
    ended = resile.run("run", resile.script(PREAMBLE + "train()"), "-w", "1", "--storage", "nonsense")
    assert ended.status == 2
    assert "it is not a URL of storage" in ended.last_error
    assert ended.err.count("\n") == 1
