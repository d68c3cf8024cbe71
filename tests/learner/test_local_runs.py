"""The home folder: a run can be found and resumed whatever moment it was killed at, and only old ones go."""

import os
import resource
from pathlib import Path

import pytest

from resile_learner.local import runs
from resile_learner.local.core import Origin
from resile_learner.local.history import HistoryItem
from resile_learner.local.runs import Home, Journal, RunFolder, read_journal
from resile_learner.processes.worker_log import MAX_LOG_BYTES, worker_log
from resile_shared.errors import ResileError, UsageError

SCRIPT = Path("/somewhere/train.py")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def began(folder: RunFolder, script: Path = SCRIPT) -> RunFolder:
    folder.note_start(script, ("--lr", "0.1"), "train", "file:///storage", 0.0)
    return folder


def test_a_home_is_private(home: Home) -> None:
    assert home.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("name", "prefix"), [("train", "train-"), ("My Script!", "my-script-"), ("___", "run-")])
def test_a_run_has_a_short_readable_id(name: str, prefix: str, home: Home) -> None:
    job = home.create(name).job
    assert job.startswith(prefix)
    assert len(job) == len(prefix) + 6


def test_a_resumed_run_knows_its_life_so_far(home: Home) -> None:
    folder = began(home.create("train"))
    for worker in range(3):
        folder.note_worker(worker)
    folder.note_order(1)
    folder.note_order(2)
    item = HistoryItem(1, 12.5, "allocation", 1, 3, ("local/0",), 0, "start")
    folder.note_history(item)
    folder.note_checkpoint(10)
    folder.close()
    journal = home.resume(SCRIPT, None).journal
    assert journal == Journal(
        str(SCRIPT),
        ("--lr", "0.1"),
        "train",
        "file:///storage",
        Origin(worker=3, generation=3, history=2),
        True,
        (item,),
    )


def test_a_line_that_was_cut_short_is_forgotten(home: Home) -> None:
    folder = began(home.create("train"))
    folder.note_worker(0)
    folder.close()
    with (folder.path / "journal").open("ab") as journal:
        journal.write(b'{"kind":"worker","wor')
    assert read_journal(folder.path).origin.worker == 1
    resumed = home.resume(SCRIPT, None)
    resumed.note_worker(1)
    assert read_journal(folder.path).origin.worker == 2


def test_what_a_full_disk_keeps_out_of_the_journal_is_written_once_there_is_room(home: Home) -> None:
    folder = began(home.create("train"))
    journal = folder.path / "journal"
    size = journal.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, limits[1]))
    try:
        for worker in range(3):
            folder.note_worker(worker)
        assert folder.journal_fault
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_journal(folder.path).origin.worker == 1, "no line is torn"
    folder.note_order(4)
    assert not folder.journal_fault
    origin = read_journal(folder.path).origin
    assert (origin.worker, origin.generation) == (3, 5)


def test_a_damaged_journal_is_told(home: Home) -> None:
    folder = began(home.create("train"))
    folder.close()
    file = folder.path / "journal"
    file.write_bytes(b"nonsense\n" + file.read_bytes())
    with pytest.raises(ResileError, match="line 1 is not readable"):
        home.resume(SCRIPT, None)


def test_the_newest_run_of_the_script_is_resumed(home: Home) -> None:
    folders = [began(home.create("train"), script) for script in (SCRIPT, SCRIPT, Path("/other.py"))]
    for age, folder in enumerate(folders):
        os.utime(folder.path / "journal", (age, age))
        folder.close()
    assert home.resume(SCRIPT, None).job == folders[1].job
    assert home.resume(SCRIPT, folders[0].job).job == folders[0].job


def test_a_run_in_use_is_not_resumed(home: Home) -> None:
    folder = began(home.create("train"))
    with pytest.raises(UsageError, match=f"{folder.job} is still running"):
        home.resume(SCRIPT, None)


@pytest.mark.parametrize("run", ["train-ffffff", "../../etc", "", "train"])
def test_a_run_that_is_not_there_is_not_resumed(run: str, home: Home) -> None:
    began(home.create("train"))
    with pytest.raises(UsageError, match="there is no run"):
        home.resume(Path("/other.py"), run)


def test_old_runs_go_unless_they_are_in_use(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "KEEP_RUNS", 2)
    folders = [began(home.create("train")) for _ in range(5)]
    for age, folder in enumerate(folders):
        os.utime(folder.path / "journal", (age, age))
        if age != 1:
            folder.close()
    fresh = home.create("train")
    home.prune()
    left = {path.name for path in (home.path / "runs").iterdir()}
    assert left == {folders[1].job, folders[4].job, fresh.job}


def test_a_log_stops_growing_at_its_limit(tmp_path: Path) -> None:
    line = "x" * 1_000_000
    with worker_log(tmp_path, 3) as log:
        for _ in range(MAX_LOG_BYTES // len(line) + 10):
            log.write(line)
    file = tmp_path / "worker-3.log"
    assert file.stat().st_size <= MAX_LOG_BYTES
    assert file.read_bytes().endswith(b"[this log is full: what follows is not kept]\n")
