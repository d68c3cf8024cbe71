"""What a host offers, and what its workers see of it."""

import os

import pytest

from resile_learner.agent.devices import detect_devices, inheritable, slot_environment
from resile_learner.agent.settings import LearnerSettings, parse_labels
from resile_shared.errors import UsageError
from resile_shared.messages.hosts import Slot
from resile_shared.settings import load


async def test_without_accelerators_a_slot_is_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices = await detect_devices(slots=None, slots_per_gpu=1)
    assert devices.slots == tuple(Slot(index=index) for index in range(len(os.sched_getaffinity(0))))
    assert devices.device_class.startswith("torch ")


def test_a_worker_sees_the_accelerator_of_its_slot_alone() -> None:
    slot = Slot(index=5, device="cuda:1")
    assert slot_environment(slot, {}) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert slot_environment(slot, {"CUDA_VISIBLE_DEVICES": "4,6"}) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert slot_environment(Slot(index=5), {}) == {}


def test_workers_inherit_nothing_about_the_pools_services() -> None:
    assert inheritable({"RESILE_CREDENTIALS": "file", "HOME": "/root"}) == {"HOME": "/root"}


def test_labels_are_names_and_values() -> None:
    assert parse_labels("gpu=h200, zone=a") == {"gpu": "h200", "zone": "a"}
    assert parse_labels("") == {}


def test_errors_in_the_settings_name_their_flags() -> None:
    flags = ["--credentials", "c", "--folder", "f", "--storage", "file:///s"]
    assert load(LearnerSettings, program="learner", arguments=flags).host
    with pytest.raises(UsageError, match=r"--labels or RESILE_LABELS.*'gpu' is no label"):
        load(LearnerSettings, program="learner", arguments=[*flags, "--labels", "gpu"])
    with pytest.raises(UsageError, match="--host or RESILE_HOST"):
        load(LearnerSettings, program="learner", arguments=[*flags, "--host", "a.b"])
