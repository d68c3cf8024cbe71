"""Making a shard give the same bits on every worker, and recording the operations for which that is impossible.

Operations that have no deterministic form warn, and so mark the run instead of failing it. The backward pass of
attention is the exception: its fused kernels are deterministic only where PyTorch would raise instead of warn. PyTorch
is therefore set to raise while one of their nodes runs, and to warn otherwise.
"""

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import deterministic as _deterministic

from .torch_settings import OWN, set_compiled_alike

_WARNING = re.compile(
    r"(.*?) (?:does not have a deterministic implementation|defaults to a non-deterministic algorithm)"
    r"|.*is not deterministic because it uses (CuBLAS)",
    re.DOTALL,
)
_FILTER = f"(?s){_WARNING.pattern}"
re.compile(_FILTER, re.IGNORECASE)  # for the cache in which `filterwarnings` looks: workers are forked later
_MAX_NAME = 100
FUSED_ATTENTION = re.compile("(Flash|Efficient|Cudnn|Fused).*Attention.*Backward")


class Reproducibility:
    """Whether a run gives the same bits whatever happens to it; ``str()`` of it is shown to the user.

    ``observed`` are the operations without a deterministic form that ran on this worker, and the ``caveats`` of its
    session. Members exchange them, and what they have agreed on is part of the run's state: a worker
    that joins or resumes must not forget it.
    """

    def __init__(self, mode: str, *, caveats: Sequence[str] = ()) -> None:
        self._mode = mode
        self.observed = {what[:_MAX_NAME] for what in caveats}
        self._agreed: set[str] = set()

    def __str__(self) -> str:
        if self._mode == "fast":
            return "fast"
        return "bits not guaranteed: " + ", ".join(self.operations) if self.operations else "same bits"

    @property
    def operations(self) -> tuple[str, ...]:
        """The nondeterministic operations that this worker knows of, its own and other members', sorted by name."""
        return tuple(sorted(self.observed | self._agreed))

    def agree(self, operations: Iterable[str]) -> None:
        """Record what some member has observed; all members record the same at the same round."""
        self._agreed.update(operations)

    def state_dict(self) -> dict[str, Any]:
        """Return what the members agreed on."""
        return {"operations": sorted(self._agreed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what other members, or an earlier run, agreed on."""
        self.agree(state_dict["operations"])


class Determinism:
    """PyTorch's deterministic mode, as a run needs it. Enter it with `deterministic`."""

    def __init__(self, reproducibility: Reproducibility, *, threads: int) -> None:
        self.reproducibility = reproducibility
        self._threads = threads
        self._shown = warnings.showwarning
        self._filter: object = None

    def begin_iteration(self) -> None:
        """Set what determines the kernels of compiled functions, even if the script has changed it since."""
        set_compiled_alike()

    def apply(self) -> None:
        """Set what determines the bits, even if the script or one of its libraries has changed it since."""
        if torch.get_deterministic_debug_mode() != 1:
            torch.use_deterministic_algorithms(True, warn_only=True)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        _deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)  # no deterministic backward pass
        torch.set_warn_always(True)  # some operations warn once in a process, maybe before the training call
        self._record()

    @contextmanager
    def backward(self, *losses: Tensor) -> Iterator[None]:
        """Run the backward pass of ``losses`` in this context."""
        self._record()
        with ExitStack() as stack:
            stack.callback(torch.set_deterministic_debug_mode, "warn")
            on_devices = [loss for loss in losses if loss.device.type != "cpu"]
            for node in _fused_attention(on_devices) if on_devices else ():
                stack.callback(node.register_prehook(_raise_instead_of_warning).remove)
                stack.callback(node.register_hook(_warn_again).remove)
            yield

    def _record(self) -> None:
        """Be the first to see warnings; a script may have changed the filters since."""
        if not warnings.filters or warnings.filters[0] is not self._filter:
            warnings.filterwarnings("always", message=_FILTER)
            self._filter = warnings.filters[0]
        if warnings.showwarning != self._show:
            self._shown = warnings.showwarning
            warnings.showwarning = self._show

    def _show(self, message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if found := _WARNING.match(str(message)):
            self.reproducibility.observed.add((found[1] or found[2])[:_MAX_NAME])
        else:
            self._shown(message, category, *where, **more)


@contextmanager
def deterministic(reproducibility: Reproducibility, *, threads: int) -> Iterator[Determinism]:
    """Use deterministic algorithms and a fixed number of threads; restore the settings afterwards.

    An operation without a deterministic form is recorded in ``reproducibility`` instead of failing.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # where a function is compiled first inside the run
    os.environ.setdefault("TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES", "0")
    determinism = Determinism(reproducibility, threads=threads)
    before = [setting.get() for setting in OWN]
    with warnings.catch_warnings():
        determinism.begin_iteration()
        determinism.apply()
        try:
            yield determinism
        finally:
            for setting, value in zip(OWN, before, strict=True):
                setting.set(value)


def _fused_attention(losses: Iterable[Tensor]) -> Iterator[Node]:
    """Find the nodes of fused attention in the graph of ``losses``."""
    waiting = [loss.grad_fn for loss in losses]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [function for function, _ in node.next_functions]
        if FUSED_ATTENTION.search(node.name()):
            yield node


def _raise_instead_of_warning(gradients: object) -> None:
    torch.set_deterministic_debug_mode("error")


def _warn_again(inputs: object, outputs: object) -> None:
    torch.set_deterministic_debug_mode("warn")
