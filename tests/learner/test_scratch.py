"""Temporary folders whose makers were killed go; what belongs to others stays."""

import fcntl
import os
from pathlib import Path

from resile_learner.agent.scratch import Scratch

HOUR_AGO = 3600.0


def old(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    os.utime(folder, (HOUR_AGO, HOUR_AGO))
    return folder


def test_only_folders_that_a_killed_process_made_are_removed(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    users = [old(tmp_path / name, "precious") for name in ("resile-home", "resile-scratch-of-mine")]
    orphan = old(tmp_path / "resile-scratch-12345678", ".resile-scratch", "left-behind")
    lived_in = old(tmp_path / "resile-scratch-87654321", ".resile-scratch")
    lock = os.open(lived_in, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    scratch = Scratch()
    try:
        assert scratch.path.parent == tmp_path
        assert not orphan.exists()
        assert lived_in.exists()
        assert all((user / "precious").exists() for user in users)
    finally:
        os.close(lock)
        os.close(scratch.lock)
        scratch.remove()
    assert not scratch.path.exists()
