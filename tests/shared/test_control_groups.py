"""What a container limits counts, whichever version of control groups it is limited by."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resile_shared.control_groups import num_processors, own_folders
from resile_testing.control_groups import limited_group

MOUNT = "36 35 0:26 {shown} {place} ro,nosuid,relatime shared:9 - {kind} {kind} rw,{options}\n"
FIRST, SECOND = "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 64 processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def of_second(root: Path, *, group: str, shown: str = "/") -> Path:
    write(root / "proc/self/cgroup", f"0::{group}\n")
    write(root / "proc/self/mountinfo", MOUNT.format(shown=shown, place=SECOND, kind="cgroup2", options="nsdelegate"))
    return root / SECOND.lstrip("/")


def of_first(root: Path, *, group: str, shown: str = "/") -> Path:
    write(root / "proc/self/cgroup", f"9:memory:/other\n4:cpu,cpuacct:{group}\n1:name=systemd:/\n0::/unified\n")
    memory = MOUNT.format(shown="/", place="/sys/fs/cgroup/memory", kind="cgroup", options="memory")
    cpu = MOUNT.format(shown=shown, place=FIRST, kind="cgroup", options="cpu,cpuacct")
    write(root / "proc/self/mountinfo", memory + cpu)
    return root / FIRST.lstrip("/")


def limit_first(folder: Path, quota: int) -> None:
    write(folder / "cpu.cfs_quota_us", f"{quota}\n")
    write(folder / "cpu.cfs_period_us", "100000\n")


def test_without_a_quota_all_processors_count(tmp_path: Path) -> None:
    assert num_processors(tmp_path) == 64, "no /proc"
    write(of_second(tmp_path, group="/a") / "a/cpu.max", "max 100000\n")
    assert num_processors(tmp_path) == 64
    limit_first(of_first(tmp_path / "first", group="/a") / "a", -1)
    assert num_processors(tmp_path / "first") == 64


@pytest.mark.parametrize(("quota", "number"), [(200000, 2), (250000, 2), (50000, 1), (9900000, 64)])
def test_a_quota_counts_in_whole_processors_and_one_at_least(tmp_path: Path, quota: int, number: int) -> None:
    write(of_second(tmp_path, group="/") / "cpu.max", f"{quota} 100000\n")
    assert num_processors(tmp_path) == number
    limit_first(of_first(tmp_path / "first", group="/a") / "a", quota)
    assert num_processors(tmp_path / "first") == number


def test_the_quota_of_an_outer_group_counts(tmp_path: Path) -> None:
    top = of_second(tmp_path, group="/slice/pod/box")
    write(top / "slice/pod/box/cpu.max", "800000 100000\n")
    write(top / "slice/pod/cpu.max", "max 100000\n")
    write(top / "slice/cpu.max", "300000 100000\n")
    assert num_processors(tmp_path) == 3
    top = of_first(tmp_path / "first", group="/slice/box")
    limit_first(top / "slice/box", -1)
    limit_first(top / "slice", 400000)
    assert num_processors(tmp_path / "first") == 4


def test_a_container_finds_its_own_group_whatever_it_is_called_outside(tmp_path: Path) -> None:
    """Docker mounts the group of the container, and without a namespace the process has the name of the outside."""
    limit_first(of_first(tmp_path / "first", group="/docker/1f", shown="/docker/1f"), 200000)
    assert num_processors(tmp_path / "first") == 2
    limit_first(of_first(tmp_path / "inner", group="/docker/1f/job", shown="/docker/1f") / "job", 300000)
    assert num_processors(tmp_path / "inner") == 3
    write(of_second(tmp_path, group="/../2e", shown="/") / "cpu.max", "500000 100000\n")
    assert num_processors(tmp_path) == 5


def test_each_controller_has_its_own_folders(tmp_path: Path) -> None:
    of_first(tmp_path, group="/docker/1f")
    memory = tmp_path / "sys/fs/cgroup/memory"
    assert own_folders("memory", tmp_path) == [memory / "other", memory]


@pytest.mark.skipif(os.geteuid() != 0, reason="control groups need root")
def test_a_real_quota_around_this_process_counts() -> None:
    ask = "from resile_shared.control_groups import num_processors; print(num_processors())"
    with limited_group("cpu", 100_000) as inside:
        said = subprocess.run([*inside, sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert said == "1\n"
