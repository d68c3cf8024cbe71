"""The full state of a run: what a joiner receives and what a checkpoint stores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .facts import Facts, StateDiffers, check_same_run
from .flat import FlatState, allocate, flatten, unflatten


class Stateful(Protocol):
    """Anything with PyTorch's pair of state methods."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state."""


@dataclass
class TrainingProgress:
    """How far a run has come."""

    iteration: int = 0
    """Committed training iterations."""
    round: int = 0
    """The next round."""
    iterations_total: int = 0
    epoch: int = 0
    """That of the next iteration."""
    sample: int = 0
    """How many samples of it come before the next iteration."""
    turn: int = 0
    """Where several optimizers take turns with each batch: that of the next iteration."""
    pausing: bool = False
    """Whether training stops after the last committed iteration until the job is resumed."""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)

    @property
    def last_epoch(self) -> int:
        """The epoch of the newest committed iteration."""
        return self.epoch if self.sample or self.turn else max(0, self.epoch - 1)


class RunState:
    """Gathers the state of a run from the objects that hold it, and loads it back into them.

    It consists of the progress, the facts that all members agreed on, parameters and buffers, the ``parts`` by name
    (optimizer, ledger, a validation in progress), and the user's ``extras``. ``after_load`` is called when a state was
    loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, Stateful],
        extras: Mapping[str, Stateful],
        *,
        after_load: Callable[[], None],
    ) -> None:
        self._model = model
        self._parts = parts
        self._extras = extras
        self._after_load = after_load
        self.progress = TrainingProgress()
        self.facts: Facts = {}
        self._received: tuple[bytes, list[Tensor]]

    def flatten(self) -> FlatState:
        """Return the state as it is now; its tensors are the live ones, not copies."""
        tree = {
            "progress": vars(self.progress),
            "facts": self.facts,
            "model": model_tensors(self._model),
            **{name: part.state_dict() for name, part in self._parts.items()},
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
        }
        return flatten(tree)

    def allocate_buffers(self, skeleton: bytes) -> list[Tensor]:
        """Return the tensors to receive a state into: parameters and buffers themselves, and new memory for the rest.

        While they are being filled this worker may have no complete state.
        """
        tensors = allocate(skeleton, {f"model/{name}": tensor for name, tensor in model_tensors(self._model).items()})
        self._received = skeleton, tensors
        return tensors

    def model_memory(self) -> list[Tensor]:
        """Return what `allocate_buffers` may use itself: parameters and buffers in the memory of the host."""
        return [tensor for tensor in model_tensors(self._model).values() if tensor.device.type == "cpu"]

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where the parameters are."""
        return frozenset(parameter.device for parameter in self._model.parameters())

    def load_received(self) -> None:
        """Load the state received into the buffers allocated last. Raises StateDiffers."""
        self.load(*self._received)

    @torch.no_grad()
    def load(self, skeleton: bytes, tensors: Sequence[Tensor]) -> None:
        """Load a state. Raises StateDiffers when it belongs to another script, model or dataset."""
        tree = unflatten(skeleton, tensors)
        check_same_run(self.facts, tree["facts"])
        mine = model_tensors(self._model)
        if mine.keys() != tree["model"].keys():
            names = ", ".join(sorted(mine.keys() ^ tree["model"].keys())[:3])
            raise StateDiffers(
                f"this worker's model has other parameters or buffers than the run's: {names}. Build the same model in "
                "every worker"
            )
        for name, tensor in tree["model"].items():
            if mine[name].data_ptr() != tensor.data_ptr():
                mine[name].copy_(tensor)
        for name, part in self._parts.items():
            part.load_state_dict(tree[name])
        for name, extra in self._extras.items():
            extra.load_state_dict(tree["extras"][name])
        self._after_load()
        self.progress = TrainingProgress(**tree["progress"])


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of ``model`` by name: the live ones, detached."""
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return named | {name: buffer.detach() for name, buffer in model.named_buffers()}
