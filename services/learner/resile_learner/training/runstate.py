"""The full state of a run: what a joiner is handed and what a checkpoint holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from resile_shared.errors import ResileError

from .buffers import Buffers
from .ledger import Ledger
from .state import Flat, allocate, flatten, unflatten
from .validation import Validator


class StateDiffers(ResileError):
    """A state does not belong to what this script trains."""


@dataclass
class Standing:
    """How far a run has come."""

    iteration: int = 0
    """Committed training iterations."""
    round: int = 0
    """The next round."""
    iterations_total: int = 0
    pausing: bool = False
    """Whether the last iteration was the last for now."""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)


class RunState:
    """Gathers the state of a run from the objects that hold it, and puts it back.

    It is: how far the run has come, parameters, all buffers, optimizer, the user's extras, ledger, validation under
    way, and the facts that all members agreed on.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extras: Mapping[str, Any],
        *,
        buffers: Buffers,
        ledger: Ledger,
        validator: Validator | None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._extras = extras
        self._buffers = buffers
        self._ledger = ledger
        self._validator = validator
        self.standing = Standing()
        self.facts: dict[str, str] = {}
        self._room: tuple[bytes, list[Tensor]]

    def flatten(self) -> Flat:
        """The state now; its tensors are the live ones, not copies."""
        tree = {
            "standing": vars(self.standing),
            "facts": self.facts,
            "model": self._model_tensors(),
            "optimizer": self._optimizer.state_dict(),
            "extras": {name: extra.state_dict() for name, extra in self._extras.items()},
            "ledger": self._ledger.state(),
            "validator": self._validator.state() if self._validator else None,
        }
        return flatten(tree)

    def make_room(self, skeleton: bytes) -> list[Tensor]:
        """Tensors to receive a state into; parameters and buffers are received in place."""
        tensors = allocate(skeleton, {f"model/{name}": tensor for name, tensor in self._model_tensors().items()})
        self._room = skeleton, tensors
        return tensors

    def take(self) -> None:
        """Take over the state that was received into the room made last. Raises StateDiffers."""
        self.load(*self._room)

    @torch.no_grad()
    def load(self, skeleton: bytes, tensors: Sequence[Tensor]) -> None:
        """Take over a state. Raises StateDiffers when it is of another script, model or dataset."""
        tree = unflatten(skeleton, tensors)
        self._check_facts(tree["facts"])
        mine = self._model_tensors()
        if mine.keys() != tree["model"].keys():
            raise StateDiffers(
                f"the model differs from the run's: {sorted(mine.keys() ^ tree['model'].keys())[:3]} do not match"
            )
        for name, tensor in tree["model"].items():
            if mine[name].data_ptr() != tensor.data_ptr():
                mine[name].copy_(tensor)
        self._optimizer.load_state_dict(tree["optimizer"])
        for name, extra in self._extras.items():
            extra.load_state_dict(tree["extras"][name])
        self._buffers.adopt()
        self._ledger.load(tree["ledger"])
        if self._validator and tree["validator"] is not None:
            self._validator.load(tree["validator"])
        self.standing = Standing(**tree["standing"])

    def _check_facts(self, theirs: Mapping[str, str]) -> None:
        for name, mine in self.facts.items():
            if theirs.get(name) != mine:
                raise StateDiffers(
                    f"this worker has another {name} than the run: every worker, and a resumed run, must build the "
                    "same; take away "
                    "what depends on the worker, the time or the machine (resile.training.seed() seeds a script)"
                )

    def _model_tensors(self) -> dict[str, Tensor]:
        named = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        return named | {name: buffer.detach() for name, buffer in self._model.named_buffers()}
