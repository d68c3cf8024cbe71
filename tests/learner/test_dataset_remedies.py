"""What a host says when the data of a job cannot be used: where, and what to do about it."""

import os
from pathlib import Path

import pytest

from resile.local.settings import RunSettings
from resile_learner.agent.job_datasets import JobDatasets
from resile_learner.datasets.cache import DataFailed
from resile_learner.datasets.host_datasets import HostDatasets
from resile_shared.errors import UsageError
from resile_shared.messages.datasets import Dataset
from resile_shared.storage.dataset_sources import list_source


def registered(folder: Path) -> Dataset:
    folder.mkdir(exist_ok=True)
    (folder / "one").write_text("first")
    return list_source(folder.as_uri()).registered("few", folder.as_uri())


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_source_that_has_changed_is_added_again_where_it_was_registered(
    tmp_path: Path, *, is_local: bool
) -> None:
    dataset = registered(tmp_path / "few")
    (tmp_path / "few" / "two").touch()
    cache = HostDatasets(tmp_path / "cache", storage="" if is_local else (tmp_path / "pool").as_uri())
    command = f"`resile dataset add few {dataset.uri}{' --local' if is_local else ''}`"
    with pytest.raises(DataFailed, match=f"use the new files with {command}$"):
        await cache.get(dataset, print)


@pytest.mark.parametrize("is_local", [True, False])
async def test_data_other_than_that_of_the_job_is_added_again_where_it_was_registered(
    tmp_path: Path, *, is_local: bool
) -> None:
    dataset = registered(tmp_path / "few")
    storage = tmp_path / "job"
    storage.mkdir()
    (storage / "data.json").write_text('{"few": "another"}')
    jobs = JobDatasets(HostDatasets(tmp_path / "cache", storage="" if is_local else (tmp_path / "pool").as_uri()))
    remedy = "URI --local`, and run the script again" if is_local else "URI`, and submit the job again"
    with pytest.raises(DataFailed, match=f"`resile dataset add few {remedy}"):
        await jobs.get("job-1", 1, [dataset], storage=storage.as_uri(), on_line=print)
    await jobs.close()


@pytest.mark.parametrize(("name", "reason"), [("x" * 300, "File name too long"), ("loop", "Too many levels")])
async def test_a_path_that_cannot_be_mounted_is_named_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "train.py").touch()
    mount = str(tmp_path / name)
    jobs = JobDatasets(HostDatasets(tmp_path / "cache", storage=""))
    with pytest.raises(DataFailed, match=f"{mount} cannot be used on this host: {reason}") as caught:
        await jobs.get("job-1", 1, (), storage="", mounts=[mount], on_line=print)
    assert caught.value.is_hosts_fault == (name == "loop"), "a name is too long on every host"
    with pytest.raises(UsageError, match=f"--mount {mount}: {reason}"):
        RunSettings(tmp_path / "train.py", mounts=(mount,))
    with pytest.raises(UsageError, match="there is no such file or folder"):
        RunSettings(tmp_path / "train.py", mounts=(str(tmp_path / "train.py" / "below"),))


async def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    dataset = registered(tmp_path / "few")
    (tmp_path / "cache").touch()
    with pytest.raises(DataFailed, match=f"cannot be fetched: {tmp_path}{os.sep}cache: File exists"):
        await HostDatasets(tmp_path / "cache", storage="").get(dataset, print)
