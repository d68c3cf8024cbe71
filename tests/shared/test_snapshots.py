"""What is read of one version of an object is never that of another."""

from pathlib import Path

import pytest

from resile.chaos.s3_server import S3Server
from resile_shared.storage.objects import MissingObjectError, ObjectChanged, ObjectStorage


def check_snapshot(storage: ObjectStorage) -> None:
    storage.put("a", [b"one" * 100])
    snapshot = storage.snapshot("a")
    assert snapshot.num_bytes == 300
    assert bytes(snapshot.read_range(3, 6)) == b"one"
    storage.put("a", [b"two" * 100])
    with pytest.raises(ObjectChanged, match="it was replaced meanwhile"):
        snapshot.read_range(6, 9)
    assert bytes(storage.snapshot("a").read_range(6, 9)) == b"two"
    with pytest.raises(MissingObjectError):
        storage.snapshot("b")


def test_in_a_folder(tmp_path: Path) -> None:
    check_snapshot(ObjectStorage(f"file://{tmp_path}"))


def test_on_an_s3_server(s3: S3Server) -> None:
    check_snapshot(ObjectStorage(s3.url))
