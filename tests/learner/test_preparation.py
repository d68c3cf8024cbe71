"""Locks of folders: held by who uses or changes them, and removed with them."""

import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resile_learner.preparation import lock_folder, remove_unused


def is_locked(folder: Path) -> bool:
    try:
        os.close(lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return True
    return False


def test_a_folder_in_use_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    lock = lock_folder(folder, fcntl.LOCK_SH)
    assert not remove_unused(folder, folder.rmdir)
    os.close(lock)
    assert remove_unused(folder, folder.rmdir)
    assert not list(tmp_path.iterdir()), "its lock file is gone, too"


def test_a_folder_that_stays_keeps_its_lock_file(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    assert remove_unused(folder, lambda: None)
    assert (tmp_path / "one.lock").exists()


def test_two_that_lock_a_folder_that_is_being_removed_lock_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first opened the file before it was removed; it must not hold a lock that nobody else sees."""
    folder = tmp_path / "one"
    folder.mkdir()
    flock: Callable[[int, int], None] = fcntl.flock

    def removed_first(descriptor: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        with ThreadPoolExecutor(1) as other:
            other.submit(remove_unused, folder, folder.rmdir).result()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    lock = lock_folder(folder, fcntl.LOCK_EX)
    assert is_locked(folder)
    os.close(lock)
    assert not is_locked(folder)
