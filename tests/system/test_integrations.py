"""Scripts for the trainers of other libraries keep the promises with one changed line."""

import csv
from pathlib import Path

import pytest

from .pools import pool_up
from .running import SCRIPTS, plain, plain_output, run, run_until, sha_in

pytestmark = pytest.mark.long
SECONDS = 300
"""Each worker imports the libraries by itself, which takes long on a machine that does much else."""


@pytest.mark.parametrize(
    "schedule", ["plateau", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("one-cycle", "epoch"))]
)
def test_workers_that_join_know_what_modules_callbacks_and_metrics_of_lightning_need(
    schedule: str, tmp_path: Path
) -> None:
    args = ("--schedule", schedule, "--folder", str(tmp_path))
    outcome = run("lightning_fit.py", "--plan", "0:1,6:3,18:2", home=tmp_path, args=args, seconds=SECONDS)
    assert outcome.sha == plain("lightning_fit.py", *args, seconds=SECONDS)
    assert outcome.result["iteration"] == 33


@pytest.mark.nightly
def test_files_of_lightning_are_whole_when_the_worker_that_writes_them_is_killed(tmp_path: Path) -> None:
    killed, folder = tmp_path / "killed", tmp_path / "elastic"
    args = ("--kill", str(killed), "--folder", str(folder))
    outcome = run("lightning_fit.py", "--workers", "3", home=tmp_path, args=args, seconds=SECONDS)
    assert outcome.sha == plain("lightning_fit.py", "--folder", str(tmp_path / "plain"), seconds=SECONDS)
    assert killed.exists()
    names = [[file.name for file in each.rglob("*.ckpt")] for each in (folder, tmp_path / "plain")]
    assert sorted(names[0]) == sorted(names[1])
    (rows,) = [file.read_text().splitlines() for file in folder.rglob("metrics.csv")]
    steps = {row["step"] for row in csv.DictReader(rows) if row["loss_step"]}
    assert steps == {str(step) for step in range(2, 33, 3)}


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", pytest.param("cosine", marks=pytest.mark.nightly)])
def test_workers_that_join_know_what_callbacks_schedules_and_the_best_model_need(schedule: str, tmp_path: Path) -> None:
    args = ("--schedule", schedule)
    outcome = run("trainer.py", "--plan", "0:1,6:3,18:2", home=tmp_path, args=args, seconds=SECONDS)
    assert outcome.sha == plain("trainer.py", *args, seconds=SECONDS)
    assert outcome.result["iteration"] == 33


@pytest.mark.nightly
def test_a_worker_that_is_killed_in_a_pool_changes_nothing(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with pool_up(tmp_path / "home", "--slots", 2) as pool:
        job = pool.submit(SCRIPTS / "trainer.py", "--max-workers", 2, "--", "--kill", killed)
        ended = pool.completed(job)
    assert killed.exists()
    assert ended["params_sha256"] == plain("trainer.py", seconds=SECONDS)


KERAS_GUIDES = ["images", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("dense", "inputs"))]


@pytest.mark.parametrize("guide", KERAS_GUIDES)
def test_workers_that_join_know_what_callbacks_optimizers_and_layers_of_keras_need(guide: str, tmp_path: Path) -> None:
    args = ("--guide", guide, "--folder", str(tmp_path))
    outcome = run("keras_fit.py", "--plan", "0:1,6:3,18:2", home=tmp_path, args=args, seconds=SECONDS)
    output = plain_output("keras_fit.py", *args, seconds=SECONDS)
    assert outcome.sha == sha_in(output)
    assert outcome.result["bits"] == "same bits"
    assert "in full" not in output


@pytest.mark.parametrize(
    "guide", ["inputs", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("dense", "images"))]
)
def test_a_worker_of_keras_that_is_killed_changes_nothing(guide: str, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    args = ("--guide", guide, "--folder", str(tmp_path))
    outcome = run("keras_fit.py", "--workers", "3", home=tmp_path, args=(*args, "--kill", str(killed)), seconds=SECONDS)
    assert killed.exists()
    assert outcome.sha == plain("keras_fit.py", *args, seconds=SECONDS)


@pytest.mark.nightly
@pytest.mark.parametrize("guide", ["dense", "images", "inputs"])
def test_a_run_of_keras_resumes_within_an_epoch(guide: str, tmp_path: Path) -> None:
    args = ("--guide", guide, "--folder", str(tmp_path))
    run_until("keras_fit.py", "iteration 1[2-9]", "--workers", "2", home=tmp_path, args=args)
    outcome = run("keras_fit.py", "--resume", "--workers", "3", home=tmp_path, args=args, seconds=SECONDS)
    assert outcome.sha == plain("keras_fit.py", *args, seconds=SECONDS)
