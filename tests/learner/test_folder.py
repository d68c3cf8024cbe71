"""An agent's own folder: one agent at a time, an incarnation that only rises, and no more old logs than are kept."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from resile_learner.agent import folder as module
from resile_learner.agent.folder import AgentFolder
from resile_shared.errors import UsageError


@pytest_asyncio.fixture
async def folder(tmp_path: Path) -> AsyncIterator[AgentFolder]:
    folder = await AgentFolder.open(tmp_path / "agent")
    yield folder
    folder.close()


async def test_a_second_agent_is_refused_while_a_copy_of_the_lock_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_SECONDS", 0.0)
    first = await AgentFolder.open(tmp_path / "agent")
    in_fork_server = os.dup(first.lock)
    first.close()
    with pytest.raises(UsageError, match="another agent"):
        await AgentFolder.open(tmp_path / "agent")
    os.close(in_fork_server)
    (await AgentFolder.open(tmp_path / "agent")).close()


async def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--folder: .* cannot be used: Not a directory$"):
        await AgentFolder.open(tmp_path / "file" / "agent")


async def test_an_incarnation_is_kept(folder: AgentFolder) -> None:
    assert folder.incarnation == 0
    folder.note_incarnation(7)
    assert folder.incarnation == 7


async def test_a_broken_incarnation_is_not_taken_for_none(folder: AgentFolder) -> None:
    (folder.path / "incarnation").write_text("")
    with pytest.raises(UsageError, match="holds no number"):
        folder.incarnation  # noqa: B018


async def test_only_the_oldest_jobs_without_output_are_too_many(
    folder: AgentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, job in enumerate(("new", "old", "older", "oldest", "in-use")):
        (folder.jobs / job).mkdir()
        os.utime(folder.jobs / job, (1e9 - age, 1e9 - age))
    folder.make_output("in-use")
    (folder.jobs / "being-removed").symlink_to("nowhere")
    monkeypatch.setattr(module, "KEEP_JOBS", 3)  # that one counts as the newest
    assert [path.name for path in folder.old_jobs()] == ["oldest", "older"]


async def test_files_that_are_dropped_make_room_at_once(folder: AgentFolder) -> None:
    (folder.make_output("job-1") / "notes.txt").write_text("noted")
    folder.code("job-2").mkdir()
    assert folder.jobs_with_files() == ["job-1", "job-2"]
    (gone,) = folder.drop_files("job-1")
    assert (gone / "notes.txt").exists()
    assert not folder.output("job-1").exists()
    assert list(folder.make_output("job-1").iterdir()) == []
    assert len(folder.drop_files("job-2")) == 1
    assert folder.jobs_with_files() == ["job-1"]


async def test_no_agent_runs_the_code_that_an_earlier_one_left(tmp_path: Path) -> None:
    first = await AgentFolder.open(tmp_path / "agent")
    first.code("job-1").mkdir()
    first.close()
    later = await AgentFolder.open(tmp_path / "agent")
    assert not later.code("job-1").exists()
    later.close()
