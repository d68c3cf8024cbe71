"""Output folders: every change of a regular file reaches the storage, and nothing else does."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from resile_learner.agent.job_files import Outputs
from resile_shared.storage.objects import ObjectStorage


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


async def test_a_name_that_no_object_can_have_keeps_no_other_file_from_being_stored(folder: Path, stored: Path) -> None:
    """The files behind it in the folder were never stored, and the agent tried again every few seconds."""
    outputs = Outputs(stored.parents[2].as_uri())
    names = [os.fsdecode(b"\xff"), "two\nlines", "model#1", "n" * 254, *(f"file-{number}" for number in range(20))]
    for name in names:
        (folder / name).write_text("1")
    assert await outputs.upload("job-1", folder)
    assert sorted(path.name for path in stored.iterdir()) == sorted(names[4:])
    assert sorted(outputs.take_refused("job-1")) == [
        "the output file \\udcff is not stored: the name is not UTF-8; rename it",
        "the output file model#1 is not stored: its name ends with # and digits; rename it",
        f"the output file {'n' * 254} is not stored: its name is too long; rename it",
        "the output file two\\nlines is not stored: the name two\\nlines has a control character; rename it",
    ]
    (folder / "model#1").write_text("changed")
    assert await outputs.upload("job-1", folder)
    assert outputs.take_refused("job-1") == [], "each is named once"


async def test_a_file_that_cannot_be_read_is_named_and_stored_once_it_can(
    folder: Path, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs(stored.parents[2].as_uri())
    secret = folder / "secret"
    secret.write_text("1")
    open_file = os.open

    def may_not_read(path: str | Path, *arguments: int) -> int:
        if path == secret:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(path, *arguments)

    (folder / "inner/scores.txt").write_text("1")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", may_not_read)
        assert await outputs.upload("job-1", folder)
    assert [path.name for path in stored.rglob("*") if path.is_file()] == ["scores.txt"]
    assert outputs.take_refused("job-1") == [
        "the output file secret is not stored: it cannot be read; give its owner the permission (chmod u+r)"
    ]
    secret.chmod(0o600)
    assert await outputs.upload("job-1", folder)
    assert (stored / "secret").read_text() == "1"


async def test_a_file_that_cannot_be_stored_yet_keeps_no_other_file_from_being_stored(
    folder: Path, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resile_shared.storage.objects._WAITS_SECONDS", ())
    outputs = Outputs(stored.parents[2].as_uri())
    (folder / "first").write_text("1")
    (folder / "inner/scores.txt").write_text("1")
    (stored / "first").mkdir(parents=True)
    assert not await outputs.upload("job-1", folder)
    assert (stored / "inner/scores.txt").read_text() == "1"
    (stored / "first").rmdir()
    assert await outputs.upload("job-1", folder)
    assert (stored / "first").read_text() == "1"
    assert outputs.take_refused("job-1") == []


async def test_an_upload_that_takes_long_is_not_begun_again(
    folder: Path, stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait for it give up. Each held a thread with an upload of the same file, until none was left."""
    may_end = threading.Event()
    begun: list[str] = []
    upload = ObjectStorage.upload

    def slowly(self: ObjectStorage, key: str, path: Path) -> None:
        begun.append(key)
        may_end.wait()
        upload(self, key, path)

    monkeypatch.setattr(ObjectStorage, "upload", slowly)
    outputs = Outputs(stored.parents[2].as_uri())
    (folder / "large").write_text("1")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await outputs.upload("job-1", folder)
    may_end.set()
    assert await outputs.upload("job-1", folder)
    assert begun == ["jobs/job-1/output/large"]
    assert (stored / "large").read_text() == "1"
