"""What a host offers, and what its workers see of it."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from resile_learner import devices
from resile_learner.agent.host_devices import TorchDevices, detect_devices, host_devices, inheritable
from resile_learner.agent.settings import LearnerSettings, parse_labels
from resile_learner.probe import probe_digest
from resile_learner.processes.client import ForkServerClient, ForkServerSettings
from resile_shared.control_groups import num_processors
from resile_shared.errors import ResileError, UsageError
from resile_shared.messages.hosts import Slot
from resile_shared.settings import load


async def detected(log: Path, environment: Mapping[str, str] | None = None) -> TorchDevices:
    """What a fork server's child says; nothing of it stays."""
    fork_server = await ForkServerClient.start(log=log, settings=ForkServerSettings(environment=environment))
    try:
        return await detect_devices(fork_server, {"CUDA_VISIBLE_DEVICES": ""})
    finally:
        await fork_server.close()


async def test_without_accelerators_a_slot_is_a_core(tmp_path: Path) -> None:
    devices = host_devices(await detected(tmp_path / "log"), slots=None)
    assert devices.slots == tuple(Slot(index=index) for index in range(num_processors()))
    assert devices.device_class.startswith("torch ")
    assert devices.environment(devices.slots[0]) == {}


async def class_of_host(log: Path, environment: Mapping[str, str]) -> str:
    return host_devices(await detected(log, environment), slots=1).device_class


async def test_the_process_that_asks_torch_says_what_is_wrong(tmp_path: Path) -> None:
    slices = {**os.environ, "PYTHONPATH": str(tmp_path)}
    (tmp_path / "sitecustomize.py").write_text(
        "import resile_learner.devices as devices\n"
        "def accelerators():\n"
        "    raise RuntimeError('no driver')\n"
        "devices.accelerators = accelerators\n"
    )
    with pytest.raises(ResileError, match="cannot detect the devices of this host: RuntimeError: no driver"):
        await detected(tmp_path / "log", slices)


async def test_a_fork_server_that_has_ended_describes_no_devices(tmp_path: Path) -> None:
    fork_server = await ForkServerClient.start(log=tmp_path / "log")
    await fork_server.loaded()
    await fork_server.close()
    with pytest.raises(ResileError, match="the process that asks it has ended"):
        await detect_devices(fork_server)


async def test_devices_are_described_alike_to_all_who_ask_at_once(tmp_path: Path) -> None:
    fork_server = await ForkServerClient.start(log=tmp_path / "log")
    try:
        one, other = await asyncio.gather(detect_devices(fork_server), detect_devices(fork_server))
        assert one == other
        assert fork_server.is_idle
    finally:
        await fork_server.close()


async def test_hosts_whose_environment_chooses_other_kernels_are_of_other_classes(tmp_path: Path) -> None:
    settings = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
    plain = {name: value for name, value in os.environ.items() if name not in settings}
    environments = [plain, {**plain, "OMP_NUM_THREADS": "2"}, *({**plain, name: settings[name]} for name in settings)]
    one, same, *others = [await class_of_host(tmp_path / "log", environment) for environment in environments]
    assert one == same
    for (name, value), other in zip(settings.items(), others, strict=True):
        assert f", {name}={value}, " in other
        if "AVX" in one:  # on another processor the variable may do nothing
            assert other.rpartition(" ")[2] != one.rpartition(" ")[2], name


def test_the_probe_depends_on_the_number_of_threads_at_most_and_leaves_the_settings_as_they_were() -> None:
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    state = torch.get_rng_state()
    with torch.device("meta"), torch.inference_mode(False), torch.no_grad():
        assert probe_digest(torch.device("cpu")) == probe_digest(torch.device("cpu"))
    assert (torch.get_num_threads(), torch.get_deterministic_debug_mode()) == (threads, mode)
    assert torch.equal(torch.get_rng_state(), state)


def gpus(*classes: str) -> TorchDevices:
    return TorchDevices(accelerators=tuple((f"GPU-{index}", kind) for index, kind in enumerate(classes)))


def test_a_worker_sees_the_accelerator_of_its_slot_alone() -> None:
    devices = host_devices(gpus("a", "a"), slots=None, slots_per_gpu=2)
    assert [slot.device for slot in devices.slots] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert devices.environment(devices.slots[3]) == {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    in_a_gang = devices.environment(devices.slots[1], devices.slots[0])
    assert in_a_gang == {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-0"}, "by local rank"


def test_a_host_with_two_kinds_of_accelerator_offers_the_kind_it_has_most_of() -> None:
    devices = host_devices(gpus("old", "new", "new"), slots=None)
    assert devices.device_class == "new"
    assert [devices.environment(slot)["CUDA_VISIBLE_DEVICES"] for slot in devices.slots] == ["GPU-1", "GPU-2"]
    assert "start another host with CUDA_VISIBLE_DEVICES=GPU-0" in devices.warning


def test_workers_inherit_nothing_about_the_pools_services() -> None:
    assert inheritable({"RESILE_CREDENTIALS": "file", "HOME": "/root"}) == {"HOME": "/root"}


def test_labels_are_names_and_values() -> None:
    assert parse_labels("gpu=h200, zone=a") == {"gpu": "h200", "zone": "a"}
    assert parse_labels("") == {}


def test_errors_in_the_settings_name_their_flags() -> None:
    flags = ["--credentials", "c", "--folder", "f", "--storage", "file:///s"]
    assert load(LearnerSettings, program="learner", arguments=flags).host
    with pytest.raises(UsageError, match=r"--labels or RESILE_LABELS.*'gpu' is not a label: use name=value"):
        load(LearnerSettings, program="learner", arguments=[*flags, "--labels", "gpu"])
    with pytest.raises(UsageError, match="--host or RESILE_HOST"):
        load(LearnerSettings, program="learner", arguments=[*flags, "--host", "a.b"])


def test_a_cache_of_unknown_size_is_left_out_of_the_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems, as virtual machines on ARM, do not say how large a cache is."""
    for index, size in (("index0", "32K\n"), ("index1", None)):
        (tmp_path / index).mkdir()
        if size:
            (tmp_path / index / "size").write_text(size)
    monkeypatch.setattr(devices, "_CACHES", str(tmp_path))
    assert devices._processor().endswith(" 32K")
    monkeypatch.setattr(devices, "_CACHES", str(tmp_path / "none"))
    assert devices._processor()
