"""Packages: fetched once, checked, unpacked whole or not at all, and never beyond their folder."""

import asyncio
import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from resile_learner.agent import packages as module
from resile_learner.agent.packages import BrokenPackage, Packages, find_script
from resile_shared.errors import ResileError
from resile_shared.storage import ObjectStorage
from resile_shared.testing.s3 import S3Server
from resile_shared.testing.waiting import until


class Shop:
    """A storage with packages, and a host's folder of unpacked ones."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.unpacked = folder / "packages"
        (self.storage / "packages").mkdir(parents=True)
        self.unpacked.mkdir()
        self.packages = Packages(self.storage.as_uri(), self.unpacked)

    def store(self, *members: tuple[tarfile.TarInfo, bytes]) -> str:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for member, content in members:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return self.store_bytes(packed.getvalue())

    def store_bytes(self, content: bytes) -> str:
        key = f"packages/{hashlib.sha256(content).hexdigest()}.tar.gz"
        (self.storage / key).write_bytes(content)
        return key


def file(name: str, content: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), content


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member, b""


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


async def test_a_package_is_fetched_once_for_all_workers(shop: Shop) -> None:
    key = shop.store(file("train.py", b"print()"), file("inner/data.txt", b"1"))
    one, two = await asyncio.gather(shop.packages.fetch(key), shop.packages.fetch(key))
    assert one == two
    (shop.storage / key).unlink()
    folder = await shop.packages.fetch(key)
    assert (folder / "inner/data.txt").read_bytes() == b"1"
    assert find_script(folder, "train.py") == folder / "train.py"


@pytest.mark.parametrize(
    "member",
    [
        file("../outside.txt"),
        file("/tmp/outside-of-packages.txt"),
        link("inside", "../../outside"),
        link("inside", "/etc/passwd"),
    ],
    ids=lambda member: f"{member[0].name} {member[0].linkname}",
)
async def test_what_reaches_out_of_the_folder_is_refused_or_kept_inside(
    shop: Shop, member: tuple[tarfile.TarInfo, bytes]
) -> None:
    key = shop.store(file("train.py"), member)
    try:
        folder = await shop.packages.fetch(key)
    except BrokenPackage:
        assert list(shop.unpacked.iterdir()) == []
    else:
        assert all(path.resolve().is_relative_to(folder) for path in folder.rglob("*"))
    assert not list(shop.unpacked.parent.glob("outside*"))
    assert not Path("/tmp/outside-of-packages.txt").exists()


@pytest.mark.parametrize(
    "content", [b"no archive", b"", gzip.compress(b"x" * 1000, mtime=0)[:-20], b"\x1f\x8b\x08\0" + b"\xff" * 99]
)
async def test_what_is_no_archive_is_refused(shop: Shop, content: bytes) -> None:
    with pytest.raises(BrokenPackage) as error:
        await shop.packages.fetch(shop.store_bytes(content))
    assert "\n" not in str(error.value)
    assert list(shop.unpacked.iterdir()) == []


async def test_a_package_that_unpacks_to_too_much_is_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 10)
    with pytest.raises(BrokenPackage, match="larger"):
        await shop.packages.fetch(shop.store(file("train.py", b"x" * 11)))


@pytest.mark.parametrize("key", ["packages/1", "../packages/x.tar.gz", f"packages/{'g' * 64}.tar.gz"])
async def test_a_key_of_another_form_is_refused(shop: Shop, key: str) -> None:
    with pytest.raises(BrokenPackage, match="sha256"):
        await shop.packages.fetch(key)


async def test_a_script_outside_its_package_is_not_found(shop: Shop) -> None:
    folder = await shop.packages.fetch(shop.store(file("train.py")))
    (shop.unpacked / "other.py").touch()
    for script in ("missing.py", "../other.py", str(shop.unpacked / "other.py")):
        with pytest.raises(ResileError, match="has no script"):
            find_script(folder, script)


async def test_only_packages_that_nobody_uses_go_the_oldest_first(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEEP_PACKAGES", 1)
    folders = [await shop.packages.fetch(shop.store(file("train.py", bytes([n])))) for n in range(3)]
    for age, folder in enumerate(folders):
        os.utime(folder, (1e9 - age, 1e9 - age))
    shop.packages.prune({folders[2]})
    assert [folder.exists() for folder in folders] == [True, False, True]


def test_what_a_killed_fetch_left_is_removed_by_the_next_agent(shop: Shop) -> None:
    (shop.unpacked / ".half" / "unpacked").mkdir(parents=True)
    Packages(shop.storage.as_uri(), shop.unpacked)
    assert list(shop.unpacked.iterdir()) == []


async def test_a_job_waits_for_a_storage_that_cannot_be_reached(
    shop: Shop, s3: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = shop.store(file("train.py", b"print()"))
    ObjectStorage(s3.url + "/pool").put(key, [(shop.storage / key).read_bytes()])
    s3.kill()
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    fetching = asyncio.create_task(Packages(s3.url + "/pool", shop.unpacked).fetch(key))
    await until(lambda: "the storage cannot be reached" in caplog.text)
    assert not fetching.done()
    await asyncio.to_thread(s3.start)
    assert (await fetching / "train.py").read_bytes() == b"print()"
