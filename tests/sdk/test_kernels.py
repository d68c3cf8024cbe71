"""Compiled functions are kept in the home, for the runs that follow."""

import os
import time
from pathlib import Path

from resile.local.runs import KEEP_SECONDS, kernel_folder


def test_runs_of_one_home_share_a_folder_that_stays_while_it_is_used(tmp_path: Path) -> None:
    folder = kernel_folder(tmp_path)
    (folder / "kernel.so").touch()
    older, newer = folder.parent / "torch-1.0-host", folder.parent / "torch-2.0-host"
    for path, age in ((folder, KEEP_SECONDS + 60), (older, KEEP_SECONDS + 60), (newer, KEEP_SECONDS - 60)):
        path.mkdir(exist_ok=True)
        os.utime(path, times=(time.time() - age,) * 2)
    assert kernel_folder(tmp_path) == folder
    assert (folder / "kernel.so").exists()
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, newer.name}
