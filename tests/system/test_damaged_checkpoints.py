"""What is read from storage is what was written, or it is not used, and that is said."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import TRAIN, Ended, Resile
from .pools import pool_up
from .wide import Watched

pytestmark = pytest.mark.long


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def checkpoints(run: Path) -> list[Path]:
    """The folders of complete checkpoints, oldest first."""
    return sorted(path.parent for path in run.glob("checkpoints/lineage-*/*/manifest.json"))


def name(checkpoint: Path) -> str:
    return f"{checkpoint.parent.name}/{checkpoint.name}"


def killed_run(resile: Resile, script: Path) -> Path:
    """A run that was killed when it had two checkpoints; returns its folder."""
    options = ("--workers", 2, "--json", "--", "--every", 4, "--pause", 0.2)
    watched = Watched(resile.start("run", script, *options))
    watched.until("iteration 8: checkpoint saved")
    watched.process.kill()
    watched.end()
    (run,) = (resile.home / "runs").iterdir()
    assert len(checkpoints(run)) >= 2
    return run


def warnings(ended: Ended) -> list[str]:
    return [item["reason"] for item in ended.json["history"] if item["kind"] == "warning"]


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (flip, "part-00000", "the checksum of its skeleton is wrong"),
        pytest.param(flip, "part-00001", "the checksum of part 1 is wrong", marks=pytest.mark.nightly),
        pytest.param(truncate, "part-00000", "part 0 has", marks=pytest.mark.nightly),
        (truncate, "manifest.json", "its manifest is not readable"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    damage: Callable[[Path], None], file: str, reason: str, resile: Resile, undisturbed: str
) -> None:
    script = resile.script()
    *_, older, newest = checkpoints(killed_run(resile, script))
    damage(newest / file)
    ended = resile.run("run", script, "--resume", "--workers", 2, "--json")
    assert ended.status == 0, ended.err
    (told,) = warnings(ended)
    assert f"checkpoint {name(newest)} is damaged ({reason}" in told
    assert f"the older {name(older)} is used" in told
    assert told in ended.err
    assert ended.json["params_sha256"] == undisturbed


def test_a_run_without_a_whole_checkpoint_starts_over_and_says_so(resile: Resile, undisturbed: str) -> None:
    script = resile.script()
    run = killed_run(resile, script)
    for checkpoint in checkpoints(run):
        flip(checkpoint / "part-00000")
    ended = resile.run("run", script, "--resume", "--workers", 2, "--json")
    assert ended.status == 0, ended.err
    (told,) = warnings(ended)
    assert "is damaged (" in told
    assert "training starts over from the beginning" in told
    assert ended.json["params_sha256"] == undisturbed


def test_a_job_of_a_pool_passes_over_damaged_checkpoints_by_itself(tmp_path: Path, undisturbed: str) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(TRAIN)
    storage = tmp_path / "storage"
    options = ("--hosts", 1, "--slots", 2, "--storage", storage.as_uri())
    with pool_up(tmp_path / "home", *options) as pool:
        job = pool.submit(script, "--", "--pause", 0.5, "--every", 4)  # long enough for a busy machine to pause it
        folder = storage / "jobs" / job
        pool.becomes(job, lambda _: len(checkpoints(folder)) >= 2)
        assert pool.run("pause", job).status == 0
        pool.becomes(job, lambda view: view["state"] == "paused")
        *_, older, newest = checkpoints(folder)
        flip(newest / "part-00000")
        assert pool.run("resume", job).status == 0
        view = pool.completed(job)
        (told,) = [item["reason"] for item in view["history"] if item["kind"] == "warning"]
        assert f"checkpoint {name(newest)} is damaged" in told
        assert f"the older {name(older)} is used" in told
        assert view["params_sha256"] == undisturbed
        epochs = pool.ask("ledger", job)["epochs"]
        assert [(epoch["once"], epoch["more"], epoch["never"]) for epoch in epochs] == [(480, 0, 0)] * 3


def test_a_run_whose_storage_is_empty_now_waits_for_what_it_stored(
    resile: Resile, undisturbed: str, tmp_path: Path
) -> None:
    """As when a file system is not mounted: it never starts over."""
    script, storage = resile.script(), tmp_path / "storage"
    options = ("--workers", 2, "--storage", storage.as_uri(), "--json", "--", "--every", 4, "--pause", 0.2)
    watched = Watched(resile.start("run", script, *options))
    watched.until("iteration 8: checkpoint saved")
    watched.process.kill()
    watched.end()
    storage.rename(tmp_path / "unmounted")
    resumed = Watched(resile.start("run", script, "--resume", "--workers", 2, "--storage", storage.as_uri(), "--json"))
    resumed.until(
        "has stored a checkpoint of iteration 8 in .*, but there is none that is whole: make the storage available"
    )
    shutil.copytree(tmp_path / "unmounted", storage, dirs_exist_ok=True)
    ended = resumed.end()
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed
