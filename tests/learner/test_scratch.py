"""Temporary folders whose makers were killed go; what belongs to others stays."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from resile_learner.processes.scratch import Scratch


def folder_with(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose path is short enough to be used."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_only_folders_that_a_killed_process_made_are_removed(temporary: Path) -> None:
    users = [folder_with(temporary / name, "precious") for name in ("resile-home", "resile-scratch-of-mine")]
    orphan = folder_with(temporary / "resile-scratch-12345678", ".resile-scratch", "left-behind")
    lived_in = folder_with(temporary / "resile-scratch-87654321", ".resile-scratch")
    lock = os.open(lived_in, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    scratch = Scratch()
    try:
        assert scratch.path.parent == temporary
        assert not orphan.exists()
        assert lived_in.exists()
        assert all((user / "precious").exists() for user in users)
    finally:
        os.close(lock)
        os.close(scratch.lock)
        scratch.remove()
    assert not scratch.path.exists()
