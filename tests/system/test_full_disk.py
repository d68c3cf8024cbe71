"""A disk that is full costs warnings, and nothing that was stored."""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pytest

from resile_learner.checkpoint.store import CheckpointStore
from resile_learner.state.flat import allocate
from resile_testing.waiting import block_until

from .conftest import TRAIN, Resile
from .pools import UpPool, pool_up
from .wide import WIDE, Watched, plain_sha

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk"),
]
NUM_INODES = 5000
WIDTH = 850  # with AdamW a state of 8.7 MB: two checkpoints that are kept and one on its way fit 32 MB

LOUD = TRAIN.replace("time.sleep", 'print("." * 500); time.sleep')


class SmallDisk:
    """A file system of its own, and a file that fills it."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.mount(megabytes)

    def mount(self, megabytes: int) -> None:
        options = f"size={megabytes}m,nr_inodes={NUM_INODES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)], check=True)

    def fill(self) -> None:
        with (self.folder / "filler").open("ab", buffering=0) as file:
            for size in (1 << 16, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    def make_room(self) -> None:
        (self.folder / "filler").unlink()

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class DiskWithoutInodes(SmallDisk):
    """A file system that has space, and can be filled with empty files."""

    def fill(self) -> None:
        filler = self.folder / "filler"
        filler.mkdir()
        with suppress(OSError):
            for number in range(NUM_INODES):
                (filler / str(number)).touch()

    def make_room(self) -> None:
        shutil.rmtree(self.folder / "filler")


class DiskWithQuota(SmallDisk):
    """A folder with a quota, on a file system that has space."""

    def mount(self, megabytes: int) -> None:
        image = self.folder.with_suffix(".image")
        with image.open("wb") as file:
            file.truncate(1 << 30)
        for command in (
            ["mkfs.btrfs", "--quiet", image],
            ["mount", "-o", "loop", image, self.folder],
            ["btrfs", "quota", "enable", self.folder],
            ["btrfs", "qgroup", "limit", f"{megabytes}M", "0/5", self.folder],
        ):
            subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[..., SmallDisk]]:
    disks: list[SmallDisk] = []

    def mount(
        folder: Path | None = None, *, megabytes: int = 32, kind: Callable[..., SmallDisk] = SmallDisk
    ) -> SmallDisk:
        disks.append(kind(folder or tmp_path / "disk", megabytes))
        return disks[-1]

    yield mount
    for disk in disks:
        disk.close()


@pytest.fixture(scope="module")
def undisturbed_wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    return plain_sha(tmp_path_factory.mktemp("plain"))


def test_training_goes_on_while_its_storage_is_full_and_checkpoints_are_saved_when_there_is_room(
    resile: Resile, small_disk: Callable[..., SmallDisk], undisturbed_wide: Callable[..., str]
) -> None:
    disk = small_disk()
    arguments = ("--width", WIDTH, "--every", 5, "--epochs", 5)
    storage = disk.folder.as_uri()
    process = resile.start("run", resile.script(WIDE), "--workers", 2, "--storage", storage, "--json", "--", *arguments)
    watched = Watched(process)
    watched.until("iteration 5: checkpoint saved")
    disk.fill()
    told = watched.until("is not stored yet in file://")
    assert "no space is left there; free some space" in told
    assert "training continues" in told
    (run,) = (path for path in disk.folder.iterdir() if path.is_dir())
    store = CheckpointStore(run.as_uri())
    whole = store.complete()
    assert store.load(whole[0].name, allocate).manifest.checkpoint == whole[0]
    disk.make_room()
    watched.until("checkpoint saved")
    ended = watched.end()
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed_wide(*arguments)
    assert any("no space is left" in item["reason"] for item in ended.json["history"] if item["kind"] == "warning")
    assert store.complete()[0].iteration == 50
    left = {path.name for path in run.rglob("*") if path.is_file()}
    assert not [name for name in left if "#" in name], "parts that were half written are gone"


@pytest.mark.nightly
def test_the_end_of_a_run_waits_for_room(
    resile: Resile, small_disk: Callable[..., SmallDisk], undisturbed: str
) -> None:
    disk = small_disk()
    watched = Watched(resile.start("run", resile.script(), "--workers", 2, "--storage", disk.folder.as_uri(), "--json"))
    watched.until("first iteration")
    disk.fill()
    assert "no space is left" in watched.until("the final model is not stored yet")
    assert watched.process.poll() is None
    disk.make_room()
    ended = watched.end()
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed


@pytest.mark.nightly
def test_a_run_goes_on_while_the_disk_of_its_home_is_full(
    resile: Resile, small_disk: Callable[..., SmallDisk], undisturbed: str
) -> None:
    disk = small_disk(resile.home)
    script = resile.script(LOUD)
    storage = (resile.folder / "storage").as_uri()
    options = ("--workers", 2, "--storage", storage, "--json", "--", "--pause", 0.1)
    watched = Watched(resile.start("run", script, *options))
    watched.until("first iteration")
    disk.fill()
    watched.until("what worker . prints is not kept any more: No space left on device")
    ended = watched.end()
    assert ended.status == 0, ended.err
    assert ended.json["params_sha256"] == undisturbed


@pytest.mark.nightly
def test_a_job_goes_on_while_the_disk_of_its_agent_is_full(
    tmp_path: Path, small_disk: Callable[..., SmallDisk], undisturbed: str
) -> None:
    home = tmp_path / "home"
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(LOUD)
    disk = small_disk(home / "hosts")
    with pool_up(home, "--hosts", 1, "--slots", 2, "--storage", (tmp_path / "storage").as_uri()) as pool:
        job = pool.submit(script, "--", "--pause", 0.1)
        pool.becomes(job, lambda view: view["iteration"] > 2)
        disk.fill()
        view = pool.completed(job)
        assert view["params_sha256"] == undisturbed
        said = "".join(file.read_text() for file in (home / "logs").glob("*.log"))
        assert f"of job {job} prints is not kept any more: No space left on device" in said


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (SmallDisk, "is full: running jobs train on"),
        (DiskWithQuota, "is used up: running jobs train on"),
        (DiskWithoutInodes, "is full: it has no inodes left: running jobs train on"),
    ],
)
def test_a_pool_whose_disk_was_full_works_again_when_there_is_room(
    kind: Callable[..., SmallDisk], reason: str, tmp_path: Path, small_disk: Callable[..., SmallDisk], undisturbed: str
) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(TRAIN)
    disk = small_disk(tmp_path / "home", megabytes=200, kind=kind)
    with pool_up(disk.folder, "--hosts", 1, "--slots", 2) as pool:
        job = pool.submit(script, "--", "--pause", 0.5)
        pool.becomes(job, lambda view: view["workers"] == 2)
        disk.fill()
        read_until(pool.process.stderr, reason)
        if kind is not DiskWithoutInodes:  # what is stored goes on in files that are there
            # What still fits into the last page of a file is stored.
            assert any(is_refused(pool, job, priority) for priority in range(6000, 6100))
            assert not_ready(pool, "scheduler")["reasons"]["bus_storage"]
        disk.make_room()
        if kind is not DiskWithoutInodes:
            read_until(pool.process.stderr, "nats-server restarted")
        assert pool.completed(job)["params_sha256"] == undisturbed
        assert pool.completed(pool.submit(script))["params_sha256"] == undisturbed


def not_ready(pool: UpPool, service: str) -> Any:
    """Wait until a service is not ready; return what it says."""
    url = (pool.home / "health" / service).read_text()
    answers: list[bytes] = []

    def is_not_ready() -> bool:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=5.0).close()
        except urllib.error.HTTPError as error:
            answers.append(error.read())
        return bool(answers)

    block_until(is_not_ready)
    return json.loads(answers[-1])


def is_refused(pool: UpPool, job: str, priority: int) -> bool:
    known = json.loads((pool.home / "pool.json").read_bytes())
    request = urllib.request.Request(
        f"{known['url']}/v1/jobs/{job}/priority",
        data=json.dumps({"priority": priority}).encode(),
        headers={"Authorization": f"Bearer {known['token']}", "Content-Type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=5.0).close()
    except OSError:
        return True
    return False


def read_until(stream: IO[str] | None, text: str) -> None:
    assert stream is not None
    assert any(text in line for line in stream), f"it ended without saying {text!r}"
