"""Packages: fetched once, checked, unpacked whole or not at all, and for each job anew."""

import asyncio
import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from resile.chaos.s3_server import S3Server
from resile_learner.agent import packages as module
from resile_learner.agent.packages import BrokenPackage, Packages, find_script
from resile_shared.errors import ResileError
from resile_shared.storage.archives import InvalidArchive
from resile_shared.storage.objects import ObjectStorage
from resile_testing.waiting import until


class Shop:
    """A storage with packages, and a host's folders of kept and of unpacked ones."""

    def __init__(self, folder: Path) -> None:
        self.storage = folder / "storage"
        self.kept = folder / "packages"
        self.code = folder / "code"
        (self.storage / "packages").mkdir(parents=True)
        self.kept.mkdir()
        self.code.mkdir()
        self.packages = Packages(self.storage.as_uri(), self.kept)

    async def unpack(self, key: str, job: str = "job-1") -> Path:
        await self.packages.unpack(key, self.code / job)
        return self.code / job

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


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


async def test_a_package_is_fetched_once_and_unpacked_for_each_job(shop: Shop) -> None:
    key = shop.store(file("train.py", b"print()"), file("inner/data.txt", b"1"))
    one, two = await asyncio.gather(shop.unpack(key), shop.unpack(key))
    assert one == two
    (one / "of-its-own.txt").touch()
    (shop.storage / key).unlink()
    assert (await shop.unpack(key) / "of-its-own.txt").exists(), "a later worker of the job finds what it wrote"
    other = await shop.unpack(key, "job-2")
    assert sorted(path.name for path in other.rglob("*")) == ["data.txt", "inner", "train.py"]
    assert find_script(other, "train.py") == other / "train.py"


async def test_a_small_package_is_unpacked_by_a_process_of_its_own_the_first_time_only(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (shop.store(file("train.py", code)) for code in (b"pass", b"import this"))
    await shop.unpack(first)

    async def refused(*arguments: object, **options: object) -> None:
        raise InvalidArchive("it is unpacked by a process")

    monkeypatch.setattr(module, "unpack_archive", refused)
    assert (await shop.unpack(first, "job-2") / "train.py").read_bytes() == b"pass"
    with pytest.raises(BrokenPackage, match="by a process"):
        await shop.unpack(second, "job-3")
    monkeypatch.setattr(module, "SMALL_BYTES", 1)
    with pytest.raises(BrokenPackage, match="by a process"):
        await shop.unpack(first, "job-4")


async def test_what_a_job_writes_into_its_code_is_not_run_by_the_next(shop: Shop) -> None:
    key = shop.store(file("train.py", b"print()"))
    (await shop.unpack(key) / "train.py").write_text("evil()")
    assert (await shop.unpack(key, "job-2") / "train.py").read_bytes() == b"print()"


async def test_what_a_job_writes_into_the_kept_packages_is_not_run_by_the_next(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    key = shop.store(file("train.py", b"print()"))
    evil = shop.store(file("train.py", b"evil()"))
    await shop.unpack(key)
    (kept,) = shop.kept.iterdir()
    kept.write_bytes((shop.storage / evil).read_bytes())
    assert (await shop.unpack(key, "job-2") / "train.py").read_bytes() == b"print()"
    assert "was changed on this host" in caplog.text
    kept.unlink()
    os.mkfifo(kept)
    assert (await shop.unpack(key, "job-3") / "train.py").read_bytes() == b"print()"


@pytest.mark.parametrize("content", [b"no archive", gzip.compress(b"x" * 1000, mtime=0)[:-20]])
async def test_what_cannot_be_unpacked_is_refused_and_leaves_nothing(shop: Shop, content: bytes) -> None:
    with pytest.raises(BrokenPackage) as error:
        await shop.unpack(shop.store_bytes(content))
    assert "\n" not in str(error.value)
    assert list(shop.kept.iterdir()) == list(shop.code.iterdir()) == []


async def test_a_package_of_another_content_than_its_name_says_is_refused(shop: Shop) -> None:
    key, other = shop.store(file("train.py", b"print()")), shop.store(file("train.py", b"evil()"))
    (shop.storage / key).write_bytes((shop.storage / other).read_bytes())
    with pytest.raises(BrokenPackage, match="does not match the checksum"):
        await shop.unpack(key)


async def test_a_package_that_unpacks_to_too_much_is_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 100)
    with pytest.raises(BrokenPackage, match="larger"):
        await shop.unpack(shop.store(file("train.py", b"x" * 101)))


@pytest.mark.parametrize("key", ["packages/1", "../packages/x.tar.gz", f"packages/{'g' * 64}.tar.gz"])
async def test_a_key_of_another_form_is_refused(shop: Shop, key: str) -> None:
    with pytest.raises(BrokenPackage, match="sha256"):
        await shop.unpack(key)


async def test_a_script_outside_its_package_is_not_found(shop: Shop) -> None:
    folder = await shop.unpack(shop.store(file("train.py")))
    (shop.code / "other.py").touch()
    for script in ("missing.py", "../other.py", str(shop.code / "other.py")):
        with pytest.raises(ResileError, match="has no script"):
            find_script(folder, script)


async def test_the_least_recently_used_packages_go(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [shop.store(file("train.py", bytes([n]))) for n in range(3)]
    for age, key in enumerate(keys):
        await shop.unpack(key, f"job-{age}")
        (kept,) = [path for path in shop.kept.iterdir() if path.name in key]
        os.utime(kept, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(module, "KEEP_PACKAGES", 2)
    await shop.unpack(keys[2], "job-3")
    assert sorted(path.name for path in shop.kept.iterdir()) == sorted(key[9:-7] for key in (keys[0], keys[2]))


def test_what_a_killed_fetch_left_is_removed_by_the_next_agent(shop: Shop) -> None:
    (shop.kept / ".half" / "unpacked").mkdir(parents=True)
    Packages(shop.storage.as_uri(), shop.kept)
    assert list(shop.kept.iterdir()) == []


async def test_a_job_waits_for_a_storage_that_cannot_be_reached(
    shop: Shop, s3: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = shop.store(file("train.py", b"print()"))
    ObjectStorage(s3.url + "/pool").put(key, [(shop.storage / key).read_bytes()])
    s3.kill()
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    fetching = asyncio.create_task(Packages(s3.url + "/pool", shop.kept).unpack(key, shop.code / "job-1"))
    await until(lambda: "the storage cannot be reached" in caplog.text)
    assert not fetching.done()
    await asyncio.to_thread(s3.start)
    await fetching
    assert (shop.code / "job-1" / "train.py").read_bytes() == b"print()"
