"""Where CI is set, a skipped test fails the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {
    "test_one.py": "import pytest\ndef test_one(): pytest.skip('why')\ndef test_two(): pass\n",
    "test_file.py": "import pytest\npytest.importorskip('no_such_module')\n",
    "test_other.py": "def test_three(): pass\n",
}


@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadfile"]])
def test_a_skipped_test_or_file_fails_the_run_also_where_tests_run_in_parallel(
    options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").symlink_to(Path(__file__).with_name("conftest.py"))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "--rootdir", tmp_path, *options, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"CI": "true"})
    assert done.returncode == 1, done.stdout
    for skipped in ("test_one.py::test_one", "test_file.py"):
        assert f"SKIPPED, which CI does not allow: {skipped}\n" in done.stdout
    assert "2 passed" in done.stdout
