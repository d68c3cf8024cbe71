"""The full state of a run: what a joiner receives and what a checkpoint stores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from resile_shared.errors import ResileError

from .facts import Facts, StateDiffers, check_same_run
from .flat import FlatState, allocate, flatten, is_equal, unflatten
from .memory import in_memory_order, is_expanded
from .modules import ModuleTree

_MAY_DIFFER = "may_differ"
"""Key in the state, beside "extras", of the parts and extras whose values may differ between members."""


class Stateful(Protocol):
    """Anything with PyTorch's pair of state methods."""

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Take over a state."""


class NoState(ResileError):
    """What was received is no state: its sender is within the body of a loop, which it cannot hand over."""


@dataclass
class TrainingProgress:
    """How far a run has come."""

    iteration: int = 0
    """Number of committed training iterations."""
    round: int = 0
    """Number of the next round."""
    iterations_total: int = 0
    epoch: int = 0
    """The epoch of the next iteration."""
    sample: int = 0
    """Number of samples of the epoch that come before the next iteration."""
    turn: int = 0
    """Where several optimizers take turns with each batch: the turn of the next iteration."""
    pausing: bool = False
    """Whether training stops after the last committed iteration until the job is resumed."""
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)

    @property
    def last_epoch(self) -> int:
        """The epoch of the newest committed iteration."""
        return self.epoch if self.sample or self.turn else max(0, self.epoch - 1)


class Handover(Protocol):
    """What members give to those that are behind after a loss, and to those that join: a `RunState`, or a part of one.

    See `RunState` for its methods.
    """

    @property
    def progress(self) -> TrainingProgress:
        """How far the run has come."""

    def flatten(self) -> FlatState:
        """Return what is given."""

    def allocate_buffers(self, skeleton: bytes, *, keeps_state: bool = False) -> list[Tensor]:
        """Return memory to receive it into."""

    def load_received(self) -> None:
        """Load what was received."""

    def drop_received(self) -> None:
        """No more of it comes."""


class RunState:
    """Gathers the state of a run from the objects that hold it, and loads it back into them.

    It consists of the progress, the facts that all members agreed on, parameters and buffers, what modules keep beside
    them, the ``parts`` by name (optimizer, ledger, a validation in progress), and the user's ``extras``. All members
    have the same, except for plain values of those that may differ (see `may_differ`). ``after_load`` is called when a
    state was loaded.
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
        self._modules = ModuleTree(model)
        self._modes = _modes(self._modules)
        """The modes of the modules while they train: after an epoch, one worker alone may validate."""
        self.progress = TrainingProgress()
        self.facts: Facts = {}
        self._received: tuple[bytes, list[Tensor]] | None = None

    def flatten(self) -> FlatState:
        """Return the state as it is now; its tensors are the live ones, not copies."""
        tree = {
            "progress": vars(self.progress),
            "facts": self.facts,
            "model": model_tensors(self._model),
            "modules": self._module_states(),
            **{name: part.state_dict() for name, part in self._parts.items() if not may_differ(part)},
            "extras": {name: extra.state_dict() for name, extra in self._extras.items() if not may_differ(extra)},
            _MAY_DIFFER: {name: each.state_dict() for name, each in self._of_one_member().items()},
        }
        return flatten(tree)

    def note_modes(self) -> None:
        """Note the modes of the modules: they are now those in which they compute gradients, alike on all workers."""
        self._modes = _modes(self._modules)

    def allocate_buffers(self, skeleton: bytes, *, on_host: bool = False, keeps_state: bool = False) -> list[Tensor]:
        """Return the tensors to receive a state into: parameters and buffers themselves, and new memory for the rest.

        ``on_host``: all in memory of the host, also if parameters are elsewhere. While they are being filled this
        worker has no complete state, unless it ``keeps_state``: then all are in new memory of the host.
        """
        self._received = None  # before there is memory for the next ones
        mine = {} if keeps_state else model_tensors(self._model)
        targets = {f"model/{name}": tensor for name, tensor in mine.items() if tensor is not None}
        tensors = allocate(skeleton, {path: t for path, t in targets.items() if t.device.type == "cpu" or not on_host})
        self._received = skeleton, tensors
        return tensors

    def model_memory(self) -> list[Tensor]:
        """Return what `allocate_buffers` may use on the host: parameters and buffers in its memory."""
        tensors = model_tensors(self._model).values()
        return [tensor for tensor in tensors if tensor is not None and tensor.device.type == "cpu"]

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where the parameters are."""
        return frozenset(parameter.device for parameter in self._model.parameters())

    def load_received(self) -> None:
        """Load the state received into the buffers allocated last. Raises StateDiffers, or NoState."""
        assert self._received is not None
        received, self._received = self._received, None
        if "facts" not in unflatten(*received):
            raise NoState
        self.load(*received)

    def drop_received(self) -> None:
        """Free the buffers allocated last: no more of that state comes."""
        self._received = None

    @torch.no_grad()
    def load(self, skeleton: bytes, tensors: Sequence[Tensor]) -> None:
        """Load a state. Raises StateDiffers when it belongs to another script, model or dataset."""
        tree = unflatten(skeleton, tensors)
        self._check_same_model(tree["model"])  # first: it is why the facts differ
        check_same_run(self.facts, tree["facts"])
        load_model_tensors(self._model, tree["model"])
        self._load_module_states(tree.get("modules", {}))  # older versions stored none
        for name, part in self._parts.items():
            if not may_differ(part):
                part.load_state_dict(tree[name])
        for name, extra in self._extras.items():
            if not may_differ(extra):
                extra.load_state_dict(tree["extras"][name])
        extras = {n: s for n, s in tree["extras"].items() if n not in self._parts}
        own = tree.get(_MAY_DIFFER, extras)  # older versions stored all as extras, and no attributes
        for name, each in self._of_one_member().items():
            if name in own:
                each.load_state_dict(own[name])
        self._after_load()
        self.progress = TrainingProgress(**tree["progress"])

    def _check_same_model(self, stored: Mapping[str, Tensor | None]) -> None:
        mine = model_tensors(self._model)
        others = ", ".join(sorted(mine.keys() ^ stored.keys())[:3])
        what = f"has other parameters or buffers than the run's: {others}" if others else self._other_shape(stored)
        if what:
            raise StateDiffers(
                f"this worker's model {what}. Build the same model in every worker, also when a run is resumed"
            )

    def _other_shape(self, stored: Mapping[str, Tensor | None]) -> str:
        """Say which parameter has another shape or dtype than in ``stored``; a buffer may get another one."""
        for name, parameter in self._model.named_parameters():
            value = stored[name]
            if value is not None and (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
                return (
                    f"differs from the run's: {name} has shape {list(parameter.shape)} and {parameter.dtype}, instead "
                    f"of {list(value.shape)} and {value.dtype}"
                )
        return ""

    def _of_one_member(self) -> dict[str, Stateful]:
        both = (*self._parts.items(), *self._extras.items())  # an extra of the script may have the name of a part
        return {name: each for name, each in both if may_differ(each)}

    def _module_states(self) -> dict[str, dict[str, Any]]:
        """By the path of a module: whether it is in training mode, and its extra state, if it has one."""
        states: dict[str, dict[str, Any]] = {path: {"training": mode} for path, mode in self._modes.items()}
        for path, extra in extra_states(self._model).items():
            states.setdefault(path, {})["extra"] = extra
        return states

    def _load_module_states(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        for path, module in self._model.named_modules():
            module.training = states.get(path, {}).get("training", module.training)
        self.note_modes()
        load_extra_states(self._model, {path: state["extra"] for path, state in states.items() if "extra" in state})


def may_differ(part: Stateful) -> bool:
    """Whether plain values of ``part`` may be those of one worker, such as times of callbacks.

    True only for parts of Resile's own whose class has ``may_differ``.
    """
    return getattr(type(part), "may_differ", False)


def is_same_state(one: bytes, other: bytes) -> bool:
    """Whether two skeletons are of the same state of a run, except for what may differ between its members."""
    return is_equal(one, other, ignoring=_MAY_DIFFER)


def model_tensors(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the parameters and buffers of ``model`` by name: the live ones, detached.

    None stands for a buffer that is registered but has no value. A buffer that two modules share has both names.
    """
    named: dict[str, Tensor | None] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, module, key in registered_buffers(model):
        buffer = module._buffers[key]
        named[name] = None if buffer is None else buffer.detach()
    return named


@torch.no_grad()
def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    """Load what `model_tensors` returned for a model with the same names.

    Values are copied into the model's own memory. A buffer that cannot hold its value, because a forward pass created
    or replaced it in only one of the models, is replaced by a new tensor.
    """
    for name, parameter in model.named_parameters():
        _copy(parameter, tensors[name])
    _load_buffers(model, tensors)


def _load_buffers(model: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
    device = next((parameter.device for parameter in model.parameters()), None)
    loaded: dict[int, Tensor] = {}
    for name, module, key in registered_buffers(model):
        if name not in tensors:  # the script has registered it since
            continue
        buffer, value = module._buffers[key], tensors[name]
        if value is None:
            module._buffers[key] = None
        elif buffer is None:
            module._buffers[key] = value.to(device, copy=True)
        elif not _can_hold(buffer, value) or loaded.setdefault(id(buffer), value) is not value:
            module._buffers[key] = value.to(buffer.device, copy=True)
        else:
            _copy(buffer, value)


class BufferValues:
    """The buffers of a model, as a part of a state."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers by name, detached; None for one without a value."""
        buffers = {name: module._buffers[key] for name, module, key in registered_buffers(self._model)}
        return {name: None if buffer is None else buffer.detach() for name, buffer in buffers.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, as `load_model_tensors` does."""
        _load_buffers(self._model, state_dict)


def extra_states(model: nn.Module) -> dict[str, Any]:
    """Return the extra state of each module that has one, as in PyTorch's ``state_dict()``, by the module's path."""
    return {
        path: module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def load_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Load what `extra_states` returned for a model with the same modules."""
    for path, state in states.items():
        model.get_submodule(path).set_extra_state(state)


def registered_buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The name of each registered buffer, its module, and its key there."""
    for path, module in model.named_modules():
        for key in module._buffers:
            yield f"{path}.{key}" if path else key, module, key


def _modes(modules: ModuleTree) -> dict[str, bool]:
    """Whether each module is in training mode, by its path."""
    return {path: module.training for path, module in modules.named()}


def _can_hold(buffer: Tensor, value: Tensor) -> bool:
    """Whether ``value`` can be copied into ``buffer`` so that it has the same shape, dtype and memory order."""
    return (
        buffer.shape == value.shape
        and buffer.dtype == value.dtype
        and not is_expanded(buffer)
        and in_memory_order(buffer)[0] == in_memory_order(value)[0]
    )


def _copy(target: Tensor, value: Tensor | None) -> None:
    if value is not None and target.data_ptr() != value.data_ptr():
        target.copy_(value)
