"""Scripts for IBM's Elastic Distributed Training run as they are, and keep the promises."""

import json
import re
from pathlib import Path

import pytest
import torch

from resile.integrations.ibm_edt import environment

from .pools import pool_up
from .running import SCRIPTS, Outcome, plain, run

pytestmark = pytest.mark.long
SCRIPT = SCRIPTS / "edt" / "elastic-main.py"
COMPAT = ("--compat", "ibm-edt")
PLAN = ("--plan", "0:1,3:3,11:2")
EPOCHS = ["epoch 0, save_model False", "epoch 1, save_model False", "epoch 2, save_model False"]


@pytest.fixture(autouse=True)
def as_on_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plain run, which is no worker, has to be told."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(environment.__file__).with_name("modules")))
    for name in ("RESULT_DIR", "LOG_DIR", "DATA_DIR", "FABRIC_HOME"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))


def elastic(script: Path, *options: str, tmp_path: Path, args: tuple[str, ...] = ()) -> Outcome:
    """Run it as a user would: without its modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH")
        return run(script, *COMPAT, *options, home=tmp_path / "home", args=args)


@pytest.mark.parametrize("own_step", [("--own-step",), pytest.param((), marks=pytest.mark.nightly)])
def test_a_script_has_the_same_bits_and_the_same_files_on_any_number_of_workers(
    own_step: tuple[str, ...], tmp_path: Path
) -> None:
    outcome = elastic(SCRIPT, *PLAN, tmp_path=tmp_path, args=own_step)
    expected = plain(SCRIPT, *own_step)
    assert outcome.sha == expected
    assert outcome.sizes == [(0, 1), (3, 3), (11, 2)]
    assert outcome.result["bits"] == "same bits"
    outcome.assert_every_sample_once(epochs=4)
    assert elastic(SCRIPT, "--workers", "3", tmp_path=tmp_path, args=own_step).sha == expected

    result = Path(outcome.result["output"])
    logged = (result / "logs" / "stdout").read_text().splitlines()
    assert [int(line.split()[1]) for line in logged] == list(range(1, len(logged) + 1))  # counted on through the plan
    assert logged == (tmp_path / "LOG_DIR" / "stdout").read_text().splitlines()
    epochs = (result / "epochs.txt").read_text()
    assert epochs.splitlines()[:3] == EPOCHS
    assert epochs == (tmp_path / "RESULT_DIR" / "epochs.txt").read_text()
    groups = [json.loads(line)["grouplabel"] for line in (result / "logs/evaluation-metrics.txt").open()]
    assert groups.count("test") == 2
    assert groups.count("train") == len(logged)
    assert [test["steps"] for test in json.loads((result / "val_dict_list.json").read_text())] == [50, 100]
    for kind in ("2", "4", "final"):
        parameters = torch.load(result / "model" / "train" / f"model_epoch_{kind}.pth")
        assert set(parameters) >= {"first.weight", "norm.running_mean"}
        assert torch.load(result / "model" / "train" / f"model_epoch_{kind}_optimizer_state.pth")["param_groups"]


def test_a_script_for_the_newest_version_of_the_interface_runs_as_it_is(tmp_path: Path) -> None:
    script = SCRIPTS / "edt" / "notebook.py"
    outcome = elastic(script, "--plan", "0:1,2:3", tmp_path=tmp_path)
    assert outcome.sha == elastic(script, "--workers", "1", tmp_path=tmp_path).sha  # it has no seed
    assert set(outcome.result["metrics"]) == {"distance"}
    assert "tested after 30 iterations: ['distance', 'loss']" in outcome.errors
    assert outcome.errors.count("trained") == 1, outcome.errors
    assert torch.load(tmp_path / "downloaded" / "model_epoch_final.pth")


@pytest.mark.nightly
def test_a_pool_runs_it_and_keeps_its_files_although_a_worker_is_killed(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    expected = plain(SCRIPT)
    with pool_up(tmp_path / "home", "--slots", 2) as pool:
        job = pool.submit(SCRIPT, *COMPAT, "--max-workers", 2, "--", "--kill", killed)
        ended = pool.completed(job)
        fetched = pool.run("output", job, "-o", tmp_path / "output")
        assert fetched.status == 0, fetched.err
        refused = pool.run("submit", SCRIPT, "--compat", "ibm")
    assert killed.exists()
    assert ended["params_sha256"] == expected
    assert (tmp_path / "output" / "model" / "train" / "model_epoch_final.pth").is_file()
    assert re.findall(r"epoch (\d)", (tmp_path / "output" / "epochs.txt").read_text())[-1] == "3"
    assert refused.status == 2
    assert "there is no such interface: use ibm-edt" in refused.err
