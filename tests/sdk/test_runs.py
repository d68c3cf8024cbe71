"""The home folder: a run can be found and resumed whatever moment it was killed at, and only old ones go."""

import fcntl
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resile.local import runs
from resile.local.runs import Home, Journal, RunFolder, read_journal
from resile_learner.processes.worker_log import MAX_LOG_BYTES, worker_log
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.jobs import HistoryItem, JobRecord, JobSpec, JobState
from resile_shared.messages.message import at
from resile_shared.messages.reports import BatchStep

SCRIPT = Path("/somewhere/train.py")
BATCHES = (BatchStep(iteration=0, batch_size=64), BatchStep(iteration=9, batch_size=128))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def began(folder: RunFolder, script: Path = SCRIPT) -> RunFolder:
    folder.note_start(script, ("--lr", "0.1"), "train", "file:///storage", 0.0, batches=BATCHES)
    return folder


def test_a_home_is_private(home: Home) -> None:
    assert home.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("name", "prefix"), [("train", "train-"), ("My Script!", "my-script-"), ("___", "run-")])
def test_a_run_has_a_short_readable_id(name: str, prefix: str, home: Home) -> None:
    job = home.create(name).job
    assert job.startswith(prefix)
    assert len(job) == len(prefix) + 6


def items(*numbers: int) -> tuple[HistoryItem, ...]:
    made = (HistoryItem(number=n, time=at(n), kind="queued", generation=0, workers=0, iteration=0) for n in numbers)
    return tuple(made)


def record(job: str, *, num_items: int, next_worker: int = 0) -> JobRecord:
    return JobRecord(
        job=job,
        spec=JobSpec(name="train", package="/somewhere", script="/somewhere/train.py"),
        state=JobState.QUEUED,
        priority=5000,
        submitted=at(0),
        next_worker=next_worker,
        num_items=num_items,
    )


def test_a_resumed_run_has_the_record_the_whole_history_and_the_newest_generation(home: Home) -> None:
    folder = began(home.create("train"))
    for new in (items(1), items(2, 3)):
        num_items = new[-1].number
        folder.note_record(record(folder.job, num_items=num_items, next_worker=num_items), new)
    folder.note_generation(1)
    folder.note_generation(2)
    folder.close()
    resumed = home.resume(SCRIPT, None)
    newest = record(folder.job, num_items=3, next_worker=3)
    assert resumed.journal == Journal(
        str(SCRIPT), ("--lr", "0.1"), "train", "file:///storage", newest, items(1, 2, 3), 2, BATCHES
    )
    resumed.note_record(newest, ())
    assert read_journal(folder.path) == resumed.journal, "no item of the history is journaled twice"


def test_a_line_that_was_cut_short_is_ignored(home: Home) -> None:
    folder = began(home.create("train"))
    folder.note_generation(1)
    folder.close()
    with (folder.path / "journal").open("ab") as journal:
        journal.write(b'{"kind":"generation","gen')
    assert read_journal(folder.path).generation == 1
    resumed = home.resume(SCRIPT, None)
    resumed.note_generation(2)
    assert read_journal(folder.path).generation == 2


def test_what_a_full_disk_keeps_out_of_the_journal_is_written_once_there_is_room(home: Home) -> None:
    folder = began(home.create("train"))
    journal = folder.path / "journal"
    size = journal.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, limits[1]))
    try:
        folder.note_generation(1)
        folder.note_record(record(folder.job, num_items=2), items(1, 2))
        assert folder.journal_fault
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_journal(folder.path).record is None, "no line is torn"
    assert read_journal(folder.path).generation == 1
    folder.note_generation(4)
    assert not folder.journal_fault
    assert read_journal(folder.path).record == record(folder.job, num_items=2)


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


def ended(home: Home, count: int) -> list[RunFolder]:
    """Make the folders of ``count`` runs that have ended, the oldest first."""
    folders = [began(home.create("train")) for _ in range(count)]
    for age, folder in enumerate(folders):
        os.utime(folder.path / "journal", (age, age))
        folder.close()
    return folders


def test_runs_that_start_together_prune_the_same_folders(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "KEEP_RUNS", 1)
    ended(home, 100)
    with ThreadPoolExecutor(2) as threads:
        for pruning in [threads.submit(home.prune) for _ in range(2)]:
            pruning.result()
    assert len(list((home.path / "runs").iterdir())) == 1


def test_a_folder_that_cannot_be_deleted_keeps_no_other(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "KEEP_RUNS", 1)
    folders = ended(home, 3)
    lock = folders[0].path / "lock"
    lock.unlink()
    lock.mkdir()
    with pytest.raises(IsADirectoryError, match=folders[0].job):
        home.prune()
    assert {path.name for path in (home.path / "runs").iterdir()} == {folders[0].job, folders[2].job}


def test_a_run_that_is_half_deleted_is_not_resumed_and_goes_at_last(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "KEEP_RUNS", 1)
    folders = ended(home, 2)

    def killed(path: Path) -> None:
        (path / "lock").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "remove_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            home.prune()
    with pytest.raises(UsageError, match=f"there is no run '{folders[0].job}'"):
        home.resume(SCRIPT, folders[0].job)
    home.prune()
    assert [path.name for path in (home.path / "runs").iterdir()] == [folders[1].job]


def test_a_run_that_is_deleted_while_it_is_opened_is_not_resumed(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "KEEP_RUNS", 1)
    folders = ended(home, 2)
    lock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        home.prune()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(UsageError, match=f"there is no run '{folders[0].job}'"):
        home.resume(SCRIPT, folders[0].job)


def test_a_log_stops_growing_at_its_limit(tmp_path: Path) -> None:
    line = "x" * 1_000_000
    with worker_log(tmp_path, 3) as log:
        for _ in range(MAX_LOG_BYTES // len(line) + 10):
            log.write(line)
    file = tmp_path / "worker-3.log"
    assert file.stat().st_size <= MAX_LOG_BYTES
    assert file.read_bytes().endswith(b"[this log is full: what follows is not kept]\n")
