"""What a source of data lists: every file under its own name, or a refusal that names the file."""

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from resile_shared.errors import ResileError
from resile_shared.messages.datasets import Dataset
from resile_shared.storage.dataset_sources import SourceUnusable, list_source
from resile_shared.storage.local_datasets import changing_datasets, read_datasets
from resile_shared.storage.objects import ObjectStorage, StorageError


class Bucket:
    """An S3 server that answers with the list of ``objects``, keys and sizes as S3 has them, and with their sizes."""

    def __init__(self) -> None:
        self.objects: dict[str, int] = {}
        bucket = self

        class Requests(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = bucket.listing()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_HEAD(self) -> None:
                size = bucket.objects.get(unquote(self.path).removeprefix("/bucket/"))
                self.send_response(404 if size is None else 200)
                self.send_header("Content-Length", str(size or 0))
                self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
                self.send_header("ETag", '"1"')
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def listing(self) -> bytes:
        objects = "".join(
            f"<Contents><Key>{key}</Key><Size>{size}</Size><LastModified>2026-01-01T00:00:00Z</LastModified>"
            f'<ETag>"{key}"</ETag></Contents>'
            for key, size in self.objects.items()
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{objects}</ListBucketResult>".encode()


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    made = Bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{made.server.server_port}")
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    yield made
    made.server.shutdown()
    made.server.server_close()


def listed(source: str, **options: str) -> dict[str, int]:
    return {key: version.num_bytes for key, version in list_source(source, **options).files.items()}


def test_the_objects_that_tools_write_for_folders_are_no_files(bucket: Bucket) -> None:
    bucket.objects = {"few/": 0, "few/a/": 0, "few/a/one": 5, "few/a/b/": 0, "few/a/b/two": 6, "few/c": 7, "few/c/": 0}
    assert listed("s3://bucket/few") == {"a/one": 5, "a/b/two": 6, "c": 7}
    bucket.objects = {"few/": 0}
    with pytest.raises(SourceUnusable, match="there are no files"):
        listed("s3://bucket/few")


@pytest.mark.parametrize("marker", ["few/a/", "few/a"])
def test_an_object_with_content_that_is_also_a_folder_is_refused(bucket: Bucket, marker: str) -> None:
    bucket.objects = {marker: 1, "few/a/one": 5}
    with pytest.raises(SourceUnusable, match="the object a has content and is also a folder: rename it"):
        listed("s3://bucket/few")


@pytest.mark.parametrize("uri", ["s3://bucket/few/a%20b%231.csv", "pool:few/a b#1.csv"])
def test_a_single_object_is_found_by_its_name_whatever_it_contains(bucket: Bucket, uri: str) -> None:
    bucket.objects = {"few/a b#1.csv": 5}
    assert listed(uri, pool="s3://bucket") == {"a b#1.csv": 5}


def test_a_file_whose_name_the_storage_does_not_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "run#1").mkdir()
    (tmp_path / "run#1" / "a#b").write_text("x")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert listed(tmp_path.as_uri()) == {"run#1/a#b": 1}
    (tmp_path / "run#1" / "model#7").write_text("x")
    with pytest.raises(SourceUnusable, match="the name run#1/model#7 cannot be used: rename the file"):
        listed(tmp_path.as_uri())
    with pytest.raises(StorageError, match="its name ends with # and digits; rename it") as caught:
        listed((tmp_path / "run#1" / "model#7").as_uri())
    assert not caught.value.transient


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (b"a\nb", r"the name a\\nb has a control character; rename it"),
        (b"\xff", r"the name %FF is not UTF-8; rename it"),
        (b"around", r"around is a link that leads back to itself, or to a folder that contains it; remove the link"),
        (b"itself", r"itself is a link that leads back to itself, or to a folder that contains it; remove the link"),
    ],
)
def test_what_cannot_be_listed_is_named_and_not_tried_again(tmp_path: Path, name: bytes, message: str) -> None:
    path = os.fsencode(tmp_path / "few") + b"/" + name
    (tmp_path / "few").mkdir()
    if name in (b"around", b"itself"):
        os.symlink(path if name == b"itself" else tmp_path, path)
    else:
        Path(os.fsdecode(path)).touch()
    with pytest.raises(StorageError, match=message) as caught:
        listed((tmp_path / "few").as_uri())
    assert not caught.value.transient


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "one").write_text("first")
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "below").symlink_to(tmp_path / "elsewhere")
    assert listed((tmp_path / "few").as_uri()) == {"below/one": 5}


def test_a_folder_of_the_pool_is_read_by_its_very_name(tmp_path: Path) -> None:
    pool = (tmp_path / "pool").as_uri()
    ObjectStorage(pool).put("run/x", [b"1"])
    (tmp_path / "pool" / "run#1").mkdir()
    (tmp_path / "pool" / "run#1" / "y").write_text("22")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("333")
    assert listed("pool:run#1", pool=pool) == {"y": 2}
    for uri in ("pool:%2e%2e/secret", "pool:../secret", "pool:run/./x", "pool:run//x"):
        with pytest.raises(ResileError, match=r"there are no files|name a folder of the pool's storage"):
            listed(uri, pool=pool)


@pytest.mark.parametrize("uri", ["s3://bucket/run#1", "s3://bucket/run?x=1", "file:///srv/run#1"])
def test_a_uri_whose_end_would_be_ignored_is_refused(uri: str) -> None:
    with pytest.raises(SourceUnusable, match=r"write %(23|3F) instead of [#?], which ends the path of a URL"):
        listed(uri)


def test_datasets_that_are_changed_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    def dataset(name: str) -> Dataset:
        return Dataset(name=name, uri=f"file:///{name}", num_files=1, num_bytes=1, version="0" * 64)

    def add_another() -> None:
        with changing_datasets(tmp_path) as registered:
            registered["two"] = dataset("two")

    other = threading.Thread(target=add_another)
    with changing_datasets(tmp_path) as registered:
        other.start()
        other.join(timeout=0.5)  # long enough to lose one of them
        registered["one"] = dataset("one")
    other.join()
    assert set(read_datasets(tmp_path)) == {"one", "two"}
