"""What a job wrote is downloaded as it was at one time, while the job writes it again."""

import io
import tarfile
from pathlib import Path

import pytest

from resile_monitor.api import downloads
from resile_shared.storage.objects import ObjectSnapshot, ObjectStorage


async def test_a_small_file_that_is_replaced_is_downloaded_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = ObjectStorage(tmp_path.as_uri())
    storage.put("small", [b"old"])
    piece, replacements = downloads._piece, [b"newer", b"new"]

    async def piece_after_replacement(snapshot: ObjectSnapshot, begin: int) -> memoryview:
        if replacements:
            storage.put("small", [replacements.pop(0)])
        return await piece(snapshot, begin)

    monkeypatch.setattr(downloads, "_piece", piece_after_replacement)
    archive = b"".join([bytes(part) async for part in downloads._tar(storage, "", ["small"])])
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        file = members.extractfile("small")
        assert file is not None
        assert file.read() == b"new"
