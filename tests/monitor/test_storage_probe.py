"""A monitor is not ready while the object storage cannot be written."""

import shutil
from pathlib import Path

from resile_monitor.storage_probe import LATE_SECONDS, StorageProbe
from resile_shared.storage.objects import ObjectStorage


async def test_a_storage_that_takes_no_writes_is_a_fault_until_it_does(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    probe = StorageProbe(ObjectStorage(folder.as_uri()))
    await probe.probe()
    assert not probe.fault
    shutil.rmtree(folder)
    folder.write_text("no folder")
    await probe.probe()
    assert f"cannot write probes/monitor in {folder.as_uri()}" in probe.fault
    folder.unlink()
    folder.mkdir()
    await probe.probe()
    assert not probe.fault


async def test_a_storage_that_does_not_answer_is_a_fault(tmp_path: Path) -> None:
    now = 0.0
    storage = ObjectStorage(tmp_path.as_uri())
    probe = StorageProbe(storage, clock=lambda: now)
    put = storage.put

    def slow(*args: object) -> None:
        nonlocal now
        now += LATE_SECONDS + 1
        assert probe.fault == f"a write to {tmp_path.as_uri()} has not been answered for 31 s"
        put(*args)  # type: ignore[arg-type]

    storage.put = slow  # type: ignore[method-assign]
    await probe.probe()
    assert not probe.fault
