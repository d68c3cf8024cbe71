"""The same bits on CUDA: gradients go through pinned buffers, workers share one GPU. Run by `make test-gpu`."""

from pathlib import Path

import pytest
import torch
from torch import nn

from resile_learner.agent.host_devices import detect_devices, host_devices
from resile_learner.processes.client import ForkServerClient
from resile_learner.training.determinism import Reproducibility, deterministic

from ..system.running import plain, run, run_until

SCRIPT = "everything.py"
ON_GPU = ("--device", "cuda", "--convolutions")


@pytest.mark.parametrize("precision", [(), ("--bf16",)])
def test_any_number_of_workers_and_any_plan_gives_the_bits_of_the_plain_script(
    precision: tuple[str, ...], tmp_path: Path
) -> None:
    sha = plain(SCRIPT, *ON_GPU, *precision)
    for options in (("--workers", "1"), ("--workers", "3"), ("--plan", "0:1,20:4,50:2,80:5")):
        outcome = run(SCRIPT, *options, home=tmp_path, args=(*ON_GPU, *precision))
        assert outcome.sha == sha, options
        assert outcome.result["bits"] == "same bits"
        outcome.assert_every_sample_once(epochs=6)


def test_a_run_killed_entirely_resumes_to_the_same_bits(tmp_path: Path) -> None:
    sha = plain(SCRIPT, *ON_GPU)
    run_until(SCRIPT, "iteration 40: checkpoint saved", "--workers", "2", home=tmp_path, args=ON_GPU)
    assert run(SCRIPT, "--resume", "--workers", "3", home=tmp_path, args=ON_GPU).sha == sha


def test_another_seed_gives_other_bits() -> None:
    assert plain(SCRIPT, *ON_GPU) != plain(SCRIPT, *ON_GPU, "--seed", "1")


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam"])
def test_attention_float16_channels_last_and_another_default_device_give_the_bits_of_the_plain_script(
    optimizer: str, tmp_path: Path
) -> None:
    args = ("--device", "cuda", "--optimizer", optimizer)
    outcome = run("unusual.py", "--plan", "0:3,10:4,15:2,21:5", home=tmp_path, args=args)
    assert outcome.sha == plain("unusual.py", *args)
    assert outcome.result["bits"] == "same bits"


@pytest.mark.parametrize(
    "kernel", [nn.attention.SDPBackend.FLASH_ATTENTION, nn.attention.SDPBackend.EFFICIENT_ATTENTION]
)
def test_fused_attention_gives_the_same_gradients_each_time(kernel: nn.attention.SDPBackend) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape, options = (2, 8, 4096, 64), {"device": "cuda", "dtype": torch.float16, "generator": generator}
    query = torch.randn(shape, **options, requires_grad=True)  # type: ignore[call-overload]
    bits = Reproducibility("same-bits")
    gradients = []
    with deterministic(bits, threads=1) as determinism, nn.attention.sdpa_kernel(kernel):
        for _ in range(5):
            loss = nn.functional.scaled_dot_product_attention(query, query, query).float().sin().sum()
            with determinism.backward(loss):
                gradients += torch.autograd.grad(loss, query)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert str(bits) == "same bits"


async def test_slots_take_turns_over_the_accelerators_and_their_class_names_them(tmp_path: Path) -> None:
    fork_server = await ForkServerClient.start(log=tmp_path / "log")
    try:
        devices, again = [host_devices(await detect_devices(fork_server), slots=None, slots_per_gpu=2) for _ in "12"]
    finally:
        await fork_server.close()
    assert len(devices.slots) == 2 * len(devices.accelerators) > 0
    assert torch.cuda.get_device_name() in devices.device_class
    assert devices == again
