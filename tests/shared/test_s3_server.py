"""The S3 server that other tests rely on."""

from pathlib import Path
from tempfile import gettempdir

from resile.chaos.s3_server import S3Server
from resile_shared.storage.objects import ObjectStorage


def test_what_was_written_survives_a_kill(s3: S3Server) -> None:
    objects = ObjectStorage(s3.url + "/folder")
    objects.put("a", [b"1", b"2"])
    s3.kill()
    assert not s3.running
    s3.start()
    assert objects.read("a") == b"12"
    s3.stop()
    assert not list(Path(gettempdir()).glob(f"seaweedfs-*-{s3.endpoint.rpartition(':')[2]}.sock"))
    s3.start()
    assert objects.sizes("") == {"a": 2}


def test_of_two_that_create_an_object_one_is_told_that_it_exists(s3: S3Server) -> None:
    """Manifests rely on it: S3 calls it If-None-Match."""
    objects = ObjectStorage(s3.url + "/folder")
    assert objects.create("manifest", b"first")
    assert not objects.create("manifest", b"second")
    assert objects.read("manifest") == b"first"
