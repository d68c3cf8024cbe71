"""What is copied of a script's project when a run begins, and which of its changes count when it resumes."""

from pathlib import Path

import pytest

from resile.local.code import open_code
from resile.local.runs import Home, RunFolder
from resile.local.settings import Resume, RunSettings
from resile_learner.code_copy import USED
from resile_shared.errors import UsageError


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a script in a folder of its own, and with the home of runs in it."""
    files = ["setup.py", "scripts/train.py", "src/part/__init__.py", "venv/pyvenv.cfg", "venv/lib.py", ".hidden/a.py"]
    for name in [*files, "notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def settings(project: Path, resume: Resume | None = None, *args: str) -> RunSettings:
    return RunSettings(script=project / "scripts" / "train.py", args=args, home=project / "home", resume=resume)


def begin(project: Path) -> RunFolder:
    folder = Home(project / "home").create("train")
    open_code(settings(project), folder)
    return folder


def copied(folder: RunFolder) -> list[str]:
    return sorted(file.relative_to(folder.code).as_posix() for file in folder.code.rglob("*.py"))


def test_the_python_files_of_the_project_are_copied_and_nothing_else(project: Path) -> None:
    for _ in range(2):  # the second copy contains nothing of the first
        assert copied(begin(project)) == ["scripts/train.py", "setup.py", "src/part/__init__.py"]


def test_without_the_mark_of_a_project_the_folder_of_the_script_is_copied(project: Path) -> None:
    (project / "setup.py").unlink()
    assert copied(begin(project)) == ["train.py"]


def test_only_changes_of_files_that_have_run_are_asked_about(project: Path) -> None:
    folder = begin(project)
    (folder.code / USED).write_text("scripts/train.py\n")
    (project / "setup.py").write_text("1")
    assert open_code(settings(project, Resume()), folder).changed == ()
    (project / "scripts" / "train.py").write_text("1")
    with pytest.raises(UsageError, match=r"changed since then: scripts/train.py. Add `--code old`"):
        open_code(settings(project, Resume()), folder)
    assert open_code(settings(project, Resume(code="old")), folder).changed == ()
    assert (folder.code / "scripts" / "train.py").read_text() == ""
    assert open_code(settings(project, Resume(code="new")), folder).changed == ("scripts/train.py",)
    assert (folder.code / "scripts" / "train.py").read_text() == "1"


def test_other_arguments_are_a_change(project: Path) -> None:
    folder = begin(project)
    with pytest.raises(UsageError, match=r"changed since then: arguments \(none\)"):
        open_code(settings(project, Resume(), "--lr", "1"), folder)
