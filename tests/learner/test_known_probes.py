"""The probe step is computed once by the workers of a job on a host, and again where something may be different."""

import _ctypes
import ctypes
from pathlib import Path

import pytest
import torch

from resile_learner.devices import device_class
from resile_learner.probe import probe_digest
from resile_learner.training import known_probes
from resile_learner.training.known_probes import KnownProbes

CPU = torch.device("cpu")
SETTINGS = {"torch.get_default_dtype()": "torch.float32"}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was computed."""
    digests: list[str] = []

    def compute(device: torch.device) -> str:
        digests.append(probe_digest(device))
        return digests[-1]

    monkeypatch.setattr(known_probes, "probe_digest", compute)
    return digests


def test_a_later_worker_has_the_class_of_the_first_and_computes_nothing(tmp_path: Path, computed: list[str]) -> None:
    classes = [device_class(CPU, KnownProbes(tmp_path, SETTINGS).digest) for _ in range(3)]
    assert len(computed) == 1
    assert set(classes) == {device_class(CPU)}


def test_it_is_computed_again_where_the_kernels_may_be_others(
    tmp_path: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After another setting of torch, with another variable, and with another library loaded."""
    device_class(CPU, KnownProbes(tmp_path, SETTINGS).digest)
    device_class(CPU, KnownProbes(tmp_path, {**SETTINGS, "torch.backends.mkldnn.enabled": "False"}).digest)
    assert len(computed) == 2
    with monkeypatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
        device_class(CPU, KnownProbes(tmp_path, SETTINGS).digest)
    assert len(computed) == 3
    library = tmp_path / "faster_kernels.so"
    library.write_bytes(Path(_ctypes.__file__).read_bytes())
    ctypes.CDLL(str(library))
    device_class(CPU, KnownProbes(tmp_path, SETTINGS).digest)
    assert len(computed) == 4


def test_what_cannot_be_kept_or_is_damaged_is_computed_again(tmp_path: Path, computed: list[str]) -> None:
    for folder in (None, tmp_path / "missing"):
        KnownProbes(folder, SETTINGS).digest(CPU, "a processor")
    assert len(computed) == 2
    KnownProbes(tmp_path, SETTINGS).digest(CPU, "a processor")
    (kept,) = tmp_path.iterdir()
    kept.write_text("half")
    assert KnownProbes(tmp_path, SETTINGS).digest(CPU, "a processor") == computed[0]
    assert len(computed) == 4
