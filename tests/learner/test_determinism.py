"""A run never says that its bits are the same when it did not see to it."""

import importlib
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextvars import Context
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from resile.training import ElasticLoop, Iteration, seed
from resile_learner.state.run import RunState
from resile_learner.training.determinism import FUSED_ATTENTION, Reproducibility, deterministic
from resile_learner.training.header import ComputedShards, Totals
from resile_shared.errors import UsageError


def train(body: Callable[[nn.Module, Tensor, Iteration], Tensor], after: Callable[[], object] = lambda: None) -> str:
    """Train with ``body`` computing the loss of each shard, and ``after`` called after each; return the run's bits."""

    def run() -> str:
        seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = ElasticLoop(model, optimizer, TensorDataset(torch.ones(16, 4)), epochs=2, batch_size=16, num_shards=4)
        for iteration in loop:
            for (inputs,) in iteration.shards():
                iteration.backward(body(model, inputs, iteration))
                after()
            if iteration.exchange():
                optimizer.step()
        assert loop.result is not None
        return loop.result.bits

    return Context().run(run)


def plainly(model: nn.Module, inputs: Tensor, iteration: Iteration) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    return loss


def without_a_deterministic_form() -> None:
    torch.zeros(4).put_(torch.tensor([1, 2]), torch.ones(2))


class FlashAttention(torch.autograd.Function):
    """Has the name of a fused kernel, and records the mode in which its backward pass runs."""

    warns: list[bool]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        FlashAttention.warns.append(torch.is_deterministic_algorithms_warn_only_enabled())
        return gradient


class Other(torch.autograd.Function):
    """Uses an operation that has no deterministic form in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        without_a_deterministic_form()
        return gradient


def test_deterministic_operations_give_the_same_bits() -> None:
    assert train(plainly) == "same bits"


def test_an_operation_without_a_deterministic_form_marks_the_run() -> None:
    def once(model: nn.Module, inputs: Tensor, iteration: Iteration) -> Tensor:
        if iteration.number == 1:
            without_a_deterministic_form()
        return plainly(model, inputs, iteration)

    assert train(once) == "bits not guaranteed: put_"


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        (
            "grid_sampler_2d_backward_cuda does not have a deterministic implementation, but you set",
            "grid_sampler_2d_backward_cuda",
        ),
        ("put_ with accumulate=False does not have a deterministic implementation", "put_ with accumulate=False"),
        (
            "Flash Attention defaults to a non-deterministic algorithm. To explicitly enable determinism call "
            "torch.use_deterministic_algorithms(True, warn_only=False).",
            "Flash Attention",
        ),
        ("Memory Efficient attention defaults to a non-deterministic algorithm. ", "Memory Efficient attention"),
        (
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
            "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
            "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set ...",
            "CuBLAS",
        ),
    ],
)
def test_every_text_with_which_pytorch_warns_is_recognised(text: str, operation: str) -> None:
    def body(model: nn.Module, inputs: Tensor, iteration: Iteration) -> Tensor:
        warnings.warn(text, stacklevel=1)
        return plainly(model, inputs, iteration)

    assert train(body) == f"bits not guaranteed: {operation}"


def test_a_script_that_silences_warnings_hides_nothing() -> None:
    def body(model: nn.Module, inputs: Tensor, iteration: Iteration) -> Tensor:
        without_a_deterministic_form()
        return plainly(model, inputs, iteration)

    before = warnings.filters[:]
    assert train(body, after=lambda: warnings.filterwarnings("ignore")) == "bits not guaranteed: put_"
    assert warnings.filters == before


def test_the_backward_pass_of_an_operation_is_seen_however_the_script_filters_warnings() -> None:
    def body(model: nn.Module, inputs: Tensor, iteration: Iteration) -> Tensor:
        warnings.simplefilter("ignore")
        loss: Tensor = Other.apply(plainly(model, inputs, iteration))  # type: ignore[no-untyped-call]
        return loss

    assert train(body) == "bits not guaranteed: put_"


def test_only_the_backward_pass_of_fused_attention_may_not_choose_what_is_not_deterministic() -> None:
    """On no real accelerator: the device is "meta", and the kernel of fused attention has its name alone."""
    FlashAttention.warns = []
    bits = Reproducibility("same-bits")
    with deterministic(bits, threads=1) as determinism:
        for _ in range(2):
            weight = torch.ones((), device="meta", requires_grad=True)
            loss: Tensor = Other.apply(FlashAttention.apply(Other.apply(weight)))  # type: ignore[no-untyped-call]
            with determinism.backward(loss):
                loss.backward()  # type: ignore[no-untyped-call]
            assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert FlashAttention.warns == [False] * 2
    assert str(bits) == "bits not guaranteed: put_", "the other operation warned, before and after it"


def test_the_mode_is_as_before_when_a_backward_pass_fails() -> None:
    weight = torch.ones((), device="meta", requires_grad=True)
    loss: Tensor = FlashAttention.apply(weight)  # type: ignore[no-untyped-call]
    assert loss.grad_fn is not None
    node = loss.grad_fn

    def attempt() -> None:
        with determinism.backward(loss):
            node.register_prehook(fail)
            loss.backward()  # type: ignore[no-untyped-call]

    with deterministic(Reproducibility("same-bits"), threads=1) as determinism:
        with pytest.raises(ZeroDivisionError):
            attempt()
        assert torch.is_deterministic_algorithms_warn_only_enabled()


def fail(gradients: object) -> None:
    raise ZeroDivisionError


def test_the_nodes_of_pytorchs_fused_attention_have_the_names_that_are_looked_for() -> None:
    heads = torch.randn(1, 1, 4, 8, requires_grad=True)
    attention = nn.functional.scaled_dot_product_attention(heads, heads, heads)
    assert attention.grad_fn is not None
    assert FUSED_ATTENTION.search(attention.grad_fn.name())
    for name in ("FlashAttention", "EfficientAttention", "CudnnAttention", "FusedAttentionOverrideable"):
        assert hasattr(torch.ops.aten, f"_scaled_dot_product_{snake_case(name)}")
        assert FUSED_ATTENTION.search(f"ScaledDotProduct{name}Backward0")


def snake_case(name: str) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"_\1", name).lower()


def test_settings_that_a_run_makes_are_made_again_when_a_script_changes_them() -> None:
    seen = set()

    def body(model: nn.Module, inputs: Tensor, iteration: Iteration) -> Tensor:
        seen.add(
            (
                torch.get_num_threads(),
                torch.get_deterministic_debug_mode(),
                torch.backends.cudnn.benchmark,
                torch.backends.cuda.cudnn_sdp_enabled(),
                torch.is_warn_always_enabled(),
            )
        )
        return plainly(model, inputs, iteration)

    def change() -> None:
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.enable_cudnn_sdp(True)
        torch.set_warn_always(False)

    assert train(body, after=change) == "same bits"
    assert seen == {(1, 1, False, False, True)}


@pytest.mark.parametrize("name", ["mkldnn", "default dtype"])
def test_a_setting_of_the_script_that_changes_in_mid_run_is_refused_by_name(name: str) -> None:
    def change() -> None:
        if name == "mkldnn":
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        else:
            torch.set_default_dtype(torch.float64)

    says = {"mkldnn": r"torch.backends.mkldnn.enabled became False", "default dtype": "get_default_dtype.. became"}
    try:
        with pytest.raises(UsageError, match=says[name] + ".* set it before the training call"):
            train(plainly, after=change)
    finally:
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
        torch.set_default_dtype(torch.float32)


def test_cublas_is_deterministic_from_the_first_product_on() -> None:
    """PyTorch reads the variable once, maybe before the training call."""
    text = "import os, resile.training; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    shown = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == ":4096:8\n"


def test_what_one_member_observed_is_known_to_all_and_to_those_that_join_or_resume() -> None:
    totals = Totals.of([ComputedShards(), ComputedShards(operations=("put_",))], [(), ()], 0, lambda left, right: left)
    member = Reproducibility("same-bits")
    member.agree(totals.operations)
    assert str(member) == "bits not guaranteed: put_"
    joiner = Reproducibility("same-bits")
    states = [RunState(nn.Linear(1, 1), {"bits": each}, {}, after_load=lambda: None) for each in (member, joiner)]
    flat = states[0].flatten()
    states[1].load(flat.skeleton, flat.tensors)
    assert str(joiner) == "bits not guaranteed: put_"
    assert not np.any(totals.used)


def test_compiled_functions_have_the_kernels_of_all_workers_whenever_the_compiler_is_loaded() -> None:
    inductor = importlib.import_module("torch._inductor.config")
    dynamo = importlib.import_module("torch._dynamo.config")
    before = dynamo.recompile_limit
    with deterministic(Reproducibility("same-bits"), threads=1) as determinism:
        assert (inductor.deterministic, dynamo.automatic_dynamic_shapes) == (True, False)
        inductor.deterministic = False
        determinism.begin_iteration()
        assert inductor.deterministic
        assert dynamo.recompile_limit > before
    assert (inductor.deterministic, dynamo.automatic_dynamic_shapes, dynamo.recompile_limit) == (False, True, before)
    script = """
from resile_learner.training.determinism import Reproducibility, deterministic
with deterministic(Reproducibility("same-bits"), threads=1):
    import torch._dynamo.config, torch._inductor.config
    print(torch._inductor.config.deterministic, torch._dynamo.config.automatic_dynamic_shapes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_settings_of_compiled_functions_need_no_name_that_an_older_pytorch_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Config:
        __slots__ = ()

    for name in ("torch._inductor.config", "torch._dynamo.config"):
        monkeypatch.setitem(sys.modules, name, Config())  # type: ignore[arg-type]
    with deterministic(Reproducibility("same-bits"), threads=1):
        pass
