"""Output folders: every change of a regular file reaches the storage, and nothing else does."""

from pathlib import Path

import pytest

from resile_learner.agent.outputs import Outputs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    (folder / "inner").mkdir(parents=True)
    return folder


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return tmp_path / "storage/jobs/job-1/output"


async def test_files_are_uploaded_once_and_again_when_they_change(folder: Path, stored: Path) -> None:
    outputs = Outputs(stored.parents[2].as_uri())
    (folder / "inner/scores.txt").write_text("1")
    assert await outputs.upload("job-1", folder)
    assert (stored / "inner/scores.txt").read_text() == "1"
    (stored / "inner/scores.txt").unlink()
    assert await outputs.upload("job-1", folder)
    assert not (stored / "inner/scores.txt").exists(), "it is not uploaded again for nothing"
    (folder / "inner/scores.txt").write_text("two")
    assert await outputs.upload("job-1", folder)
    assert (stored / "inner/scores.txt").read_text() == "two"


async def test_links_are_not_followed(folder: Path, stored: Path) -> None:
    (folder.parent / "secret").write_text("secret")
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "folder").symlink_to(folder.parent)
    assert await Outputs(stored.parents[2].as_uri()).upload("job-1", folder)
    assert list(stored.rglob("*")) == []


async def test_what_cannot_be_stored_is_tried_again(folder: Path, stored: Path) -> None:
    outputs = Outputs(stored.parents[2].as_uri())
    (folder / "notes.txt").write_text("1")
    stored.parent.mkdir(parents=True)
    stored.touch()
    assert not await outputs.upload("job-1", folder)
    stored.unlink()
    assert await outputs.upload("job-1", folder)
    assert (stored / "notes.txt").read_text() == "1"
